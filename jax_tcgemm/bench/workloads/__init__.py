"""Workloads of the benchmark: one module for each `workload` of a suite."""
