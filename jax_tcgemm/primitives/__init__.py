"""JAX primitives: typing, transformations and lowering. They never know which kernel runs."""
