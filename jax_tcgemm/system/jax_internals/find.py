"""Search for names of JAX's interpreters."""

import importlib


def find_name(module: str, name: str, instead=None):
    """`name` of one of JAX's interpreters, from where it is exported or else where it is defined.

    Where both lack it, `instead`.
    """
    for folder in ("jax.interpreters", "jax._src.interpreters"):
        try:
            return getattr(importlib.import_module(f"{folder}.{module}"), name)
        except (ImportError, AttributeError):
            pass
    return instead
