"""Which mesh axes divide which dimensions of a call, and what that leaves to be summed.

Plain data and arithmetic on names: nothing here knows how shardings are written down or found out.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

# The names of an array's dimensions, and for each dimension the mesh axes that divide it.
Names = tuple[str, ...]
Spec = tuple[tuple[str, ...], ...]


def canonical_spec(spec: PartitionSpec, ndim: int) -> Spec:
    """A `PartitionSpec` with a tuple of axes for every dimension."""
    entries = [*spec.partitions, *[None] * (ndim - len(spec))]
    return tuple(
        () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for entry in entries
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shards of one call.

    Attributes:
      extents: the whole extent of every name.
      axis_sizes: the number of devices along every mesh axis.
      divided: for every divided name the mesh axes, major first.
      scattered: for names of the addends the axes, of those that divide contracted names, over
        which the sum leaves each device another part of the dimension.
      reduced: every axis that divides a contracted name.
      unreduced: those of them over which the sum is left to whoever needs it.
    """

    extents: dict[str, int]
    axis_sizes: dict[str, int]
    divided: dict[str, tuple[str, ...]]
    scattered: dict[str, tuple[str, ...]]
    reduced: tuple[str, ...]
    unreduced: frozenset[str] = frozenset()

    def spec(self, names: Names, *, summed: bool) -> PartitionSpec:
        """How an array is divided, before or after the products are summed."""
        return PartitionSpec(
            *(
                self.divided.get(name, ()) + (self.scattered.get(name, ()) if summed else ())
                for name in names
            )
        )

    def shard_extent(self, name: str) -> int:
        """The extent of one device's part."""
        return -(-self.extents[name] // _size(self.divided.get(name, ()), self.axis_sizes))

    def start(self, name: str) -> jax.Array | int:
        """Where this device's part begins, before products are summed."""
        axes = self.divided.get(name)
        return lax.axis_index(axes) * self.shard_extent(name) if axes else 0

    def mask(self, x: jax.Array, names: Names, contracted: Iterable[str]) -> jax.Array:
        """`x` with zeros where a contracted dimension is padded because it did not divide."""
        for dim, name in enumerate(names):
            axes = self.divided.get(name, ())
            if name in contracted and self.extents[name] % _size(axes, self.axis_sizes):
                index = self.start(name) + lax.broadcasted_iota(np.int32, x.shape, dim)
                x = lax.select(index < self.extents[name], x, lax.full_like(x, 0))
        return x

    def reduce(self, addend: jax.Array, names: Names) -> jax.Array:
        """The sum of all devices' addends, or this device's part of it."""
        rest = [axis for axis in self.reduced if axis not in self.unreduced]
        for dim, name in enumerate(names):
            if axes := self.scattered.get(name):
                addend = lax.psum_scatter(addend, axes, scatter_dimension=dim, tiled=True)
                rest = [axis for axis in rest if axis not in axes]
        return lax.psum(addend, tuple(rest)) if rest else addend

    def sum_over(self, x: jax.Array, names: Iterable[str]) -> jax.Array:
        """The sum over the devices that hold other parts of these dimensions."""
        axes = [
            axis
            for name in names
            for axis in self.divided.get(name, ()) + self.scattered.get(name, ())
        ]
        return lax.psum(x, tuple(axes)) if axes else x


def _size(axes: Iterable[str], axis_sizes: dict[str, int]) -> int:
    return math.prod(axis_sizes[axis] for axis in axes)


def _common(specs: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest tuple of axes that all of these begin with."""
    common = []
    for axes in zip(*specs, strict=False):
        if len(set(axes)) > 1:
            break
        common.append(axes[0])
    return tuple(common)


def _longest(specs: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return max(specs, key=len, default=())


def lay_out(
    division,
    extents: dict[str, int],
    operand_specs: Sequence[Spec],
    result_specs: Sequence[Spec],
    axis_sizes: dict[str, int],
) -> Layout:
    """Decides what is divided over which axes.

    Every axis divides one name at most. What both sides of a contraction agree on stays, because
    then no operand moves and the sum may leave each device the part that is wanted of it; next come
    names divided alike in an operand and a result, which need no communication at all; then those
    of one operand, for whose sake only results move; and last what costs no more than taking a
    slice of an operand that every device holds.

    Args:
      division: the names, a `partitioning.Division`.
      extents: the whole extent of every name.
      operand_specs: how each operand is divided now.
      result_specs: how each result is wanted.
      axis_sizes: number of devices along each axis.

    Returns:
      The layout. Operands and results divided otherwise have to be moved.
    """
    found = {name: ([], []) for name in extents}
    for side, all_names, specs in (
        (0, division.operands, operand_specs),
        (1, division.results, result_specs),
    ):
        for names, spec in zip(all_names, specs, strict=True):
            for name, axes in zip(names, spec, strict=True):
                found[name][side].append(axes)
    contracted = division.contracted
    # A result that is a sum over a dimension would count its padding.
    exact = set(division.even) | {
        name
        for name in extents
        if name not in contracted and any(name not in names for names in division.results)
    }
    divided: dict[str, tuple[str, ...]] = {}

    def claim(name, axes):
        used = {axis for others in divided.values() for axis in others}
        own = []
        for axis in axes:
            if axis in used:
                break
            if name in exact and extents[name] % _size([*own, axis], axis_sizes):
                break
            own.append(axis)
        if own and name not in divided and name not in division.whole:
            divided[name] = tuple(own)

    free = [name for name in extents if name not in contracted]
    for name in contracted:
        claim(name, _common(found[name][0]))
    for name in free:
        in_operands, in_results = found[name]
        claim(name, _longest(_common([a, b]) for a in in_operands for b in in_results))
    for names, side in ((free, 0), (contracted, 0), (free, 1)):
        for name in names:
            claim(name, _longest(found[name][side]))

    reduced = tuple(axis for name in contracted for axis in divided.get(name, ()))
    scattered: dict[str, tuple[str, ...]] = {}
    for name in free:
        wanted = _common(found[name][1])
        own = divided.get(name, ())
        more = wanted[len(own) :]
        in_all = all(name in names for names in division.addends or division.results)
        divides = extents[name] % _size(wanted, axis_sizes) == 0
        left = set(reduced) - {axis for axes in scattered.values() for axis in axes}
        if more and wanted[: len(own)] == own and set(more) <= left and in_all and divides:
            scattered[name] = more
    return Layout(extents, dict(axis_sizes), divided, scattered, reduced)
