"""The command line, `python -m jax_tcgemm`."""
