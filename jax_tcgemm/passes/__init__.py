"""`accelerate` and its passes, which rewrite a jaxpr."""
