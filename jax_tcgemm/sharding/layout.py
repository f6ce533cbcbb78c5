"""Selection of the mesh axes over which dimensions of a call are sharded, and of its reductions.

This module is plain data and arithmetic on names, independent of how shardings are implemented.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

# The names of an array's dimensions, and for each dimension the mesh axes that shard it.
Names = tuple[str, ...]
Spec = tuple[tuple[str, ...], ...]


def canonical_spec(spec: PartitionSpec, ndim: int) -> Spec:
    """Return a `PartitionSpec` as a tuple of axes for every dimension."""
    entries = [*spec.partitions, *[None] * (ndim - len(spec))]
    return tuple(
        () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for entry in entries
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sharding of the operands and results of one call.

    Attributes:
      extents: the unsharded size of every name.
      axis_sizes: the number of devices along every mesh axis.
      divided: for every sharded name its mesh axes, major first.
      scattered: for names of the addends, the axes of contracted names over which addends are
        reduce-scattered along the dimension.
      reduced: all axes that shard a contracted name.
      unreduced: the axes in `reduced` over which the addends are not summed here.
    """

    extents: dict[str, int]
    axis_sizes: dict[str, int]
    divided: dict[str, tuple[str, ...]]
    scattered: dict[str, tuple[str, ...]]
    reduced: tuple[str, ...]
    unreduced: frozenset[str] = frozenset()

    def spec(self, names: Names, *, summed: bool) -> PartitionSpec:
        """Return the partition spec of an array, before or after addends are summed."""
        return PartitionSpec(
            *(
                self.divided.get(name, ()) + (self.scattered.get(name, ()) if summed else ())
                for name in names
            )
        )

    def shard_extent(self, name: str) -> int:
        """Return the size of one device's shard along a dimension."""
        return -(-self.extents[name] // num_devices(self.divided.get(name, ()), self.axis_sizes))

    def start(self, name: str) -> jax.Array | int:
        """Return the index at which this device's shard starts, before addends are summed."""
        axes = self.divided.get(name)
        return lax.axis_index(axes) * self.shard_extent(name) if axes else 0

    def mask(self, x: jax.Array, names: Names, contracted: Iterable[str]) -> jax.Array:
        """Set `x` to 0 where a contracted dimension is padded to equal shards."""
        for dim, name in enumerate(names):
            axes = self.divided.get(name, ())
            if name in contracted and self.extents[name] % num_devices(axes, self.axis_sizes):
                index = self.start(name) + lax.broadcasted_iota(np.int32, x.shape, dim)
                x = lax.select(index < self.extents[name], x, lax.full_like(x, 0))
        return x

    def reduce(self, addend: jax.Array, names: Names, psum: Callable) -> jax.Array:
        """Return the sum of all devices' addends, or this device's shard of the sum.

        Args:
          addend: this device's addend.
          names: names of its dimensions.
          psum: function of an array and mesh axes that sums over their devices.
        """
        rest = [axis for axis in self.reduced if axis not in self.unreduced]
        for dim, name in enumerate(names):
            if axes := self.scattered.get(name):
                addend = lax.psum_scatter(addend, axes, scatter_dimension=dim, tiled=True)
                rest = [axis for axis in rest if axis not in axes]
        return psum(addend, tuple(rest)) if rest else addend

    def sum_over(self, x: jax.Array, names: Iterable[str]) -> jax.Array:
        """Return the sum over the devices that hold other shards of these dimensions."""
        axes = [
            axis
            for name in names
            for axis in self.divided.get(name, ()) + self.scattered.get(name, ())
        ]
        return lax.psum(x, tuple(axes)) if axes else x


def num_devices(axes: Iterable[str], axis_sizes: Mapping[str, int]) -> int:
    """Return the number of devices of mesh axes."""
    return math.prod(axis_sizes[axis] for axis in axes)


def _common(specs: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the longest common prefix of tuples of axes."""
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
    """Select the mesh axes that shard each name.

    Every axis shards one name at most. Axes are assigned in this order of preference:

    1. contracted names with equal axes in both operands: no operand moves, and the sum may leave
       each device the shard of the result that is wanted;
    2. names with equal axes in an operand and a result, which need no communication;
    3. names sharded in one operand, for which only results move;
    4. names for which a device slices an operand that it holds unsharded.

    Args:
      division: the names, a `partitioning.Division`.
      extents: the unsharded size of every name.
      operand_specs: the current sharding of each operand.
      result_specs: the wanted sharding of each result.
      axis_sizes: number of devices along each axis.

    Returns:
      The layout. Operands and results with other shardings have to be moved.
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
        claimed = []
        for axis in axes:
            if axis in used:
                break
            if name in exact and extents[name] % num_devices([*claimed, axis], axis_sizes):
                break
            claimed.append(axis)
        if claimed and name not in divided and name not in division.whole:
            divided[name] = tuple(claimed)

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
        divides = extents[name] % num_devices(wanted, axis_sizes) == 0
        left = set(reduced) - {axis for axes in scattered.values() for axis in axes}
        if more and wanted[: len(own)] == own and set(more) <= left and in_all and divides:
            scattered[name] = more
    return Layout(extents, dict(axis_sizes), divided, scattered, reduced)
