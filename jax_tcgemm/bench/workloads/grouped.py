"""Common base of grouped workloads: sizes, random operands and tolerance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.bench import reference
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload


@dataclasses.dataclass(frozen=True, eq=False)
class Grouped:
    """A grouped computation of a suite: `tokens` rows, `group_sizes` of them for each group."""

    kind: str
    dtype: str
    group_sizes: np.ndarray
    tokens: int
    groups: int
    n: int
    k: int

    @property
    def element_type(self) -> np.dtype:
        """The dtype of all operands that are multiplied."""
        return jnp.dtype(DTYPES[self.dtype][0])

    @property
    def precision(self) -> str | None:
        """The precision asked of JAX."""
        precision = DTYPES[self.dtype][1]
        return None if precision == "default" else precision

    @property
    def used(self) -> int:
        """The number of groups with rows, whose weights are read."""
        return int(np.count_nonzero(self.group_sizes))

    def fits_xla(self, columns: int) -> bool:
        """Whether XLA is asked to multiply masked copies, of so many columns, for every group."""
        return self.tokens * columns * self.groups * self.element_type.itemsize <= 2e10


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Computation of a grouped workload, with the functions to compare.

    Attributes:
      shapes: shapes of the operands that are multiplied, which come first.
      integers: the other operands.
      ours, peers, reference, flops: the attributes of a `Workload`.
      elements: least number of elements that are read and written.
      roundings: number of roundings to the result's dtype that the tolerance allows for.
    """

    shapes: tuple[tuple[int, ...], ...]
    integers: tuple[jax.Array, ...]
    ours: Mapping[str, Callable]
    peers: Mapping[str, Callable]
    reference: Callable
    flops: int
    elements: int
    roundings: int


def workload(suite: str, label: str, of: Grouped, computation: Computation) -> Workload:
    """Return the workload of a computation."""
    shapes, integers, dtype = computation.shapes, computation.integers, of.element_type

    def draw(key):
        for each, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True):
            yield reference.random(each, shape, dtype)
        yield from integers

    rounding = computation.roundings * float(jnp.finfo(dtype).eps)
    return Workload(
        suite=suite,
        label=label,
        dtype=of.dtype,
        shape=f"{of.tokens}×{of.n}×{of.k}, {of.groups} groups",
        sizes={"tokens": of.tokens, "groups": of.groups, "n": of.n, "k": of.k},
        operands=(
            *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in integers),
        ),
        ours=computation.ours,
        peers=computation.peers,
        reference=computation.reference,
        tolerance=rounding + 2.0**-9 * (dtype.itemsize == 4) + 1e-4,
        flops=computation.flops,
        least_bytes=computation.elements * dtype.itemsize,
        draw=draw,
    )
