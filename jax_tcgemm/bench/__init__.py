"""Benchmarks: suites of products, timed in turns with the peers, kept as records."""
