"""Shardings of results over explicit mesh axes: what a call's `out_sharding` becomes in its rules.

An `out_sharding` is a parameter of the primitives of products: a NamedSharding of the product, in
the order of its result's dimensions, or None, which leaves it to the types of the operands.
"""

from collections.abc import Hashable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_tcgemm.sharding.layout import canonical_spec
from jax_tcgemm.system.jax_internals import with_partitions


def natural(out_sharding: NamedSharding | None, permutation) -> NamedSharding | None:
    """The sharding of a result before its dimensions are permuted."""
    if out_sharding is None:
        return None
    entries = _entries(out_sharding, len(permutation))
    return _with_entries(out_sharding, [entries[i] for i in np.argsort(permutation)])


def with_dimension(
    out_sharding: NamedSharding | None, position: int, ndim: int, mesh_axis=None
) -> NamedSharding | None:
    """The sharding of a result of `ndim` dimensions, of which the one at `position` is new."""
    if out_sharding is None:
        return None
    entries = _entries(out_sharding, ndim - 1)
    return _with_entries(out_sharding, [*entries[:position], mesh_axis, *entries[position:]])


def of_cotangent(aval, without: int | None = None) -> NamedSharding | None:
    """The sharding of a cotangent: that of its primal; unsharded in an explicit mesh otherwise.

    Args:
      aval: the primal's type.
      without: a dimension of it that is left out, or None.
    """
    if aval.sharding.mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
        return None if mesh.empty else NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim))
    if without is None:
        return aval.sharding
    entries = _entries(aval.sharding, aval.ndim)
    return _with_entries(aval.sharding, [*entries[:without], *entries[without + 1 :]])


def following(
    operands, names: Sequence[Sequence[Hashable]], result: Sequence[Hashable]
) -> NamedSharding | None:
    """The sharding of a product whose dimensions stay divided as those of its operands are.

    Where two dimensions are divided over one axis, the first of them keeps it.

    Args:
      operands: of the product.
      names: for each operand, the names of its dimensions.
      result: the names of the result's dimensions.

    Returns:
      The sharding; None without explicit mesh axes, where XLA decides.
    """
    own = [jax.typeof(x).sharding for x in operands]
    mesh = next((sharding.mesh for sharding in own if not sharding.mesh.empty), None)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return None
    specs = [canonical_spec(s.spec, x.ndim) for s, x in zip(own, operands, strict=True)]
    entries, used = [], set()
    for name in result:
        found = [
            spec[dims.index(name)] for dims, spec in zip(names, specs, strict=True) if name in dims
        ]
        axes = next((axes for axes in found if axes and not used & {*axes}), ())
        used |= {*axes}
        entries.append(axes or None)
    return NamedSharding(mesh, PartitionSpec(*entries))


def _entries(sharding: NamedSharding, ndim: int) -> list:
    return [*sharding.spec.partitions, *[None] * (ndim - len(sharding.spec))]


def _with_entries(sharding: NamedSharding, entries) -> NamedSharding:
    spec = with_partitions(sharding.spec, entries)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
