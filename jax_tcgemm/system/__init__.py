"""State of a process: extension modules, debug switches, and access to internals of JAX."""
