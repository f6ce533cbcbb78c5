"""Random problems of many kinds, for comparison with plain JAX."""
