"""Measured choices: `jax_tcgemm.autotune` makes them, `load` takes them from a file."""

import os

from jax_tcgemm.selection import tables

__all__ = ["load"]


def load(path: str | os.PathLike) -> tables.Table:
    """Reads a table and lets it decide in this process, above the cache and what ships.

    Programs that JAX has compiled keep the choices they were lowered with: call
    `jax.clear_caches()` afterwards where some of them should change.

    Args:
      path: a file that `python -m jax_tcgemm tune --out` or `Tuning.save` wrote. A table of another
        device has no effect here.

    Returns:
      The table.

    Raises:
      TypeError: for what is no path.
      OSError: when it cannot be read.
      ValueError: when it is no table of this format.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"tuning.load: path must be a path, got path of type {type(path).__name__}; "
            "pass the name of a file"
        )
    table = tables.read_table(path)
    tables.adopt(table, f"table {path}")
    return table
