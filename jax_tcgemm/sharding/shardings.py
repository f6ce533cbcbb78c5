"""Shardings of results over explicit mesh axes, for the rules of primitives.

The primitives of products have a parameter `out_sharding`: the NamedSharding of the result, or None
if the types of the operands determine the sharding.
"""

from collections.abc import Hashable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_tcgemm.sharding.layout import canonical_spec
from jax_tcgemm.system.jax_internals import with_partitions


def natural(out_sharding: NamedSharding | None, permutation) -> NamedSharding | None:
    """Return the sharding of a result before its dimensions are permuted."""
    if out_sharding is None:
        return None
    entries = _entries(out_sharding, len(permutation))
    return _with_entries(out_sharding, [entries[i] for i in np.argsort(permutation)])


def with_dimension(
    out_sharding: NamedSharding | None, position: int, ndim: int, mesh_axis=None
) -> NamedSharding | None:
    """Return the sharding of a result of `ndim` dimensions with a new dimension at `position`."""
    if out_sharding is None:
        return None
    entries = _entries(out_sharding, ndim - 1)
    return _with_entries(out_sharding, [*entries[:position], mesh_axis, *entries[position:]])


def of_cotangent(aval, without: int | None = None) -> NamedSharding | None:
    """Return the sharding of a cotangent: the primal's, or unsharded in the current mesh.

    Args:
      aval: the primal's type.
      without: a dimension of the primal that the cotangent lacks, or None.
    """
    if aval.sharding.mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
        return None if mesh.empty else NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim))
    return _without(aval.sharding, without, aval.ndim)


def without(sharding: NamedSharding | None, position: int | None) -> NamedSharding | None:
    """Return a sharding without the dimension at `position`; None removes no dimension."""
    return None if sharding is None else _without(sharding, position, len(sharding.spec))


def explicit(x) -> NamedSharding | None:
    """Return the sharding of an array over explicit mesh axes; None without such axes."""
    sharding = jax.typeof(x).sharding
    has_axes = not sharding.mesh.empty and AxisType.Explicit in sharding.mesh.axis_types
    return sharding if has_axes else None


def whole(x, axes: Sequence[int]) -> NamedSharding | None:
    """Return the sharding of an array with the dimensions `axes` unsharded."""
    if (sharding := explicit(x)) is None:
        return None
    entries = _entries(sharding, x.ndim)
    return _with_entries(
        sharding, [None if i in axes else entry for i, entry in enumerate(entries)]
    )


def merged(out_sharding: NamedSharding | None, counts: Sequence[int]) -> NamedSharding | None:
    """Return the sharding of a result after runs of `counts` dimensions are merged to one each.

    A merged dimension is sharded like the first of its run; a run of 0 is a new dimension.
    """
    if out_sharding is None:
        return None
    entries = _entries(out_sharding, sum(counts))
    firsts, start = [], 0
    for count in counts:
        firsts.append(entries[start] if count else None)
        start += count
    return _with_entries(out_sharding, firsts)


def following(
    operands, names: Sequence[Sequence[Hashable]], result: Sequence[Hashable]
) -> NamedSharding | None:
    """Return the sharding of a product whose dimensions are sharded like those of its operands.

    If two dimensions are sharded over one axis, the first of them keeps the axis.

    Args:
      operands: operands of the product.
      names: for each operand, the names of its dimensions.
      result: the names of the result's dimensions.

    Returns:
      The sharding; None without explicit mesh axes, where XLA decides.
    """
    given = [jax.typeof(x).sharding for x in operands]
    mesh = next((sharding.mesh for sharding in given if not sharding.mesh.empty), None)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return None
    specs = [canonical_spec(s.spec, x.ndim) for s, x in zip(given, operands, strict=True)]
    entries, used = [], set()
    for name in result:
        found = [
            spec[dims.index(name)] for dims, spec in zip(names, specs, strict=True) if name in dims
        ]
        axes = next((axes for axes in found if axes and not used & {*axes}), ())
        used |= {*axes}
        entries.append(axes or None)
    return NamedSharding(mesh, PartitionSpec(*entries))


def _without(sharding: NamedSharding, position: int | None, ndim: int) -> NamedSharding:
    if position is None:
        return sharding
    entries = _entries(sharding, ndim)
    return _with_entries(sharding, [*entries[:position], *entries[position + 1 :]])


def _entries(sharding: NamedSharding, ndim: int) -> list:
    return [*sharding.spec.partitions, *[None] * (ndim - len(sharding.spec))]


def _with_entries(sharding: NamedSharding, entries) -> NamedSharding:
    spec = with_partitions(sharding.spec, entries)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
