"""Measured selections: `jax_tcgemm.autotune` makes a table, `load` reads a table."""

import os

from jax_tcgemm.selection import tables

__all__ = ["load"]


def load(path: str | os.PathLike) -> tables.Table:
    """Read a table of measured selections for use in this process.

    The table takes precedence over the user's cache and over the tables that ship with the library.
    Programs that JAX has compiled keep their selections; call `jax.clear_caches()` to lower them
    again.

    Args:
      path: a file that `python -m jax_tcgemm tune --out` or `Tuning.save` wrote. A table of another
        device has no effect.

    Returns:
      The table.

    Raises:
      TypeError: if path is not a path.
      OSError: if the file cannot be read.
      ValueError: if the file is not a table of this format.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"tuning.load: path must be a path, got path of type {type(path).__name__}; "
            "pass the name of a file"
        )
    table = tables.read_table(path)
    tables.adopt(table, f"table {path}")
    return table
