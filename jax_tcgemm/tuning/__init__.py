"""Measured choices: `jax_tcgemm.autotune` makes them, `load` takes them from a file."""

from jax_tcgemm.selection.tables import load

__all__ = ["load"]
