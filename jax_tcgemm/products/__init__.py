"""The public functions of `jax_tcgemm` that multiply."""
