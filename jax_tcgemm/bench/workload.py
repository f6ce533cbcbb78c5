"""Workloads: any jitted function of ours beside its peers, on operands of any number and shape.

A suite of plain products lists `suites.Case`s. Every other suite says ``workload = "NAME"`` in its
TOML file, and the module ``jax_tcgemm.bench.NAME`` turns each of the file's groups into workloads::

    def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]: ...

`group` is a table of the file as it stands there, with keys of that module's own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """One computation, and the ways to do it that are compared.

    Attributes:
      suite: the suite it belongs to.
      label: what it is, or whose shapes these are, for people; may be empty.
      dtype: dtype name, as the suite's file has it.
      shape: its sizes, for people; with `label` unique in its suite and dtype.
      sizes: the same for programs, as the record has them.
      operands: shapes and dtypes of the operands.
      ours: functions of the operands, by name. Each gets a record, with the peers beside it.
      peers: functions of the operands that compute the same, by name.
      kept: operands, by position, that the reference takes as they are.
      budget_s: seconds that one contender may spend on it where less is asked for.
      parts: functions of the operands that compute a part of it, by name, such as the product
        without what follows: what ours can at best take. Their results are not compared.
      reference: a function of the operands, which come as float32 (16-bit ones) or float64 (wider
        and narrower ones), the other dtypes as they are; returns what every contender must return,
        an array or a tree of them.
      tolerance: largest accepted max |result - reference| / max |reference| of any array.
      flops: multiplications and additions, for TFLOP/s.
      least_bytes: least memory traffic; None counts every operand and result once.
      draw: a function of a key that makes the operands; None draws standard normal numbers, and
        integers over their whole range.
    """

    suite: str
    label: str
    dtype: str
    shape: str
    sizes: Mapping[str, int]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    ours: Mapping[str, Callable]
    peers: Mapping[str, Callable]
    reference: Callable
    tolerance: float
    flops: int
    least_bytes: int | None = None
    draw: Callable | None = None
    kept: tuple[int, ...] = ()
    budget_s: float = 0.0
    parts: Mapping[str, Callable] = dataclasses.field(default_factory=dict)

    kind = "workload"

    @property
    def title(self) -> str:
        """Description of the workload on one line."""
        return " ".join(filter(None, (self.suite, self.dtype, self.label, self.shape)))

    @property
    def input_bytes(self) -> int:
        """Bytes of the operands."""
        return sum(map(_nbytes, self.operands))

    @functools.cached_property
    def bytes(self) -> int:
        """Least memory traffic; without `least_bytes` the reference is traced for its results."""
        if self.least_bytes is not None:
            return self.least_bytes
        with jax.enable_x64(True):  # Operands say their own types.
            results = jax.tree.leaves(jax.eval_shape(self.reference, *self.operands))
        return self.input_bytes + sum(map(_nbytes, results))

    @property
    def fields(self) -> dict:
        """Fields of the workload in its records."""
        return {
            "suite": self.suite,
            "label": self.label,
            "shape": self.shape,
            "sizes": dict(self.sizes),
            "dtype": self.dtype,
        }


def check_keys(where: str, table: dict, known: Iterable[str]) -> None:
    """Raise ValueError for an unknown key of a suite's file."""
    known = tuple(known)
    if unknown := sorted(set(table) - set(known)):
        raise ValueError(
            f"bench: keys of {where} must be among {', '.join(known)}, got {', '.join(unknown)}; "
            "correct the suite's file"
        )


def check_value(name: str, value, known: Iterable[str]) -> None:
    """Raise ValueError for an unknown value of a suite's file or of the command."""
    known = tuple(known)
    if value not in known:
        raise ValueError(
            f"bench: {name} must be one of {', '.join(map(str, known))}, got {name}={value!r}; "
            "python -m jax_tcgemm bench --list shows the suites"
        )


def listed(value) -> list:
    """Return a list, from a list or a single value of a suite's file."""
    return value if isinstance(value, list) else [value]


def _nbytes(x) -> int:
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
