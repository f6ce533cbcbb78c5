"""What a process has: compiled modules, debug switches, and what JAX does not make public."""
