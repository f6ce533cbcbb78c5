"""Sharding of grouped products over devices.

Every dimension except that of the group sizes may be sharded. A device with a shard of the rows
computes the group sizes within its shard; a device with a shard of the groups has another group
offset. Rows of groups that a device does not have are zero in its result, so that the sum over
devices is the whole result.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_tcgemm.sharding.layout import Layout, canonical_spec
from jax_tcgemm.sharding.partitioning import Division


def division_of(bind, operands: dict, params) -> Division:
    """Return the sharding rules of one call.

    Args:
      bind: function that binds the primitive, with operands as keyword arguments.
      operands: types by name, in order: lhs, rhs, group_sizes, group_offset and optional operands.
      params: the primitive's parameters.
    """
    form, ragged = params["form"], "k" if params["form"] == "contraction" else "m"
    names, result, whole = names_of(operands, form, params["rhs_transposed"])
    static = {
        key: value for key, value in params.items() if key not in ("gathered", "out_sharding")
    }

    def call(*shards):
        return (bind(**dict(zip(operands, shards, strict=True)), **static),)

    def call_at(layout: Layout):
        def call(*shards):
            here = dict(zip(operands, shards, strict=True))
            groups = groups_here(layout, ragged, here["group_sizes"], here["group_offset"])
            here |= dict(zip(("group_sizes", "group_offset"), groups, strict=True))
            return (bind(**here, **static | {"groups": layout.shard_extent("g")}),)

        return call

    return Division(
        operands=names,
        results=(result,),
        call=call,
        call_at=call_at,
        whole=whole,
        even=("g",),
    )


def names_of(operands: dict, form: str = "rows", rhs_transposed: bool = False):
    """Return the names of dimensions of the operands and the result, and those never sharded.

    Args:
      operands: types by name, as for `division_of`.
      form: parameter of the primitive.
      rhs_transposed: parameter of the primitive.
    """
    num_batch = operands["group_sizes"].ndim - 1
    is_contraction = form == "contraction"
    ragged, gather = ("k" if is_contraction else "m"), "gather" in operands
    # Rows that are gathered may be anywhere in lhs, so every device needs all.
    rows = "source" if gather else ragged
    dims_of = {
        "lhs": (rows, "m" if is_contraction else "k"),
        "group_sizes": ("sizes",),
        "group_offset": ("one",),
        "gather": (ragged,),
    }
    of_blocks = _names_of_blocks(operands, num_batch)
    dims_of |= {name: names for name, (names, _) in of_blocks.items()}
    if is_contraction:
        dims_of["rhs"], result = ("k", "n"), ("g", "m", "n")
    else:
        gate = _gate_dimension(operands, num_batch)
        matrix = ("n", "k") if rhs_transposed else ("k", *gate, "n")
        dims_of["rhs"], result = ("g", *matrix), ("m", "n")
    batch = tuple(f"b{i}" for i in range(num_batch))
    extents = np.broadcast_shapes(*(aval.shape[:num_batch] for aval in operands.values()))
    names, broadcast = [], []
    for operand, aval in operands.items():
        # A batch dimension of size 1 that broadcasts has a separate name.
        batch_names = [
            name if aval.shape[i] == extents[i] else f"{name}_{operand}"
            for i, name in enumerate(batch)
        ]
        broadcast += [name for name in batch_names if name not in batch]
        names.append((*batch_names, *dims_of[operand]))
    whole = ["sizes", "one", "source", "gate", *broadcast]
    whole += [name for _, names in of_blocks.values() for name in names]
    whole = tuple(name for name in whole if any(name in dims for dims in names))
    return tuple(names), (*batch, *result), whole


def _names_of_blocks(operands: dict, num_batch: int) -> dict:
    """Return the dimensions of each operand of block scales, and the dimensions that stay whole.

    Tokens, and columns of a matrix, may be sharded if each of them has its own scales.
    """
    if "lhs_scales" not in operands:
        return {}
    gate = _gate_dimension(operands, num_batch)
    extents = {"lhs": ("m", operands["lhs"].shape[-2]), "rhs": ("n", operands["rhs"].shape[-1])}
    found = {}
    for side, (name, extent) in extents.items():
        number = operands[f"{side}_scales"].shape[-2]
        groups = ("g", *gate) if side == "rhs" else ()
        if number == extent > 1:
            found[f"{side}_scales"] = (*groups, name, f"{side}_k"), ("k", f"{side}_k")
        else:
            whole = ("k", f"{side}_k", f"{side}_rows", *((name,) if number > 1 else ()))
            found[f"{side}_scales"] = (*groups, f"{side}_rows", f"{side}_k"), whole
    return found


def result_spec(lhs, rhs, params, ndim: int) -> PartitionSpec:
    """Return the spec of a result over explicit mesh axes, with m and n sharded as in operands."""
    is_contraction = params["form"] == "contraction"
    n_axis = -2 if params["rhs_transposed"] and not is_contraction else -1
    m = lhs.sharding.spec.partitions[-1 if is_contraction else -2]
    n = rhs.sharding.spec.partitions[n_axis]
    m = None if params["gathered"] and not is_contraction else m
    (m_axes,), (n_axes,) = (canonical_spec(PartitionSpec(axes), 1) for axes in (m, n))
    return PartitionSpec(*[None] * (ndim - 2), m, None if {*m_axes} & {*n_axes} else n)


def groups_here(layout: Layout, ragged: str, sizes, offset) -> tuple[jax.Array, jax.Array]:
    """Return this device's group sizes and offset; `ragged` names the dimension of the rows."""
    sizes = _sizes_here(layout, ragged, sizes)
    # An offset out of range is clipped, on every device.
    return sizes, jnp.clip(offset, 0, sizes.shape[-1]) + layout.start("g")


def _gate_dimension(operands: dict, num_batch: int) -> tuple[str, ...]:
    """Return the name of the dimension of rhs with gate and up, if there is one."""
    return ("gate",) if operands["rhs"].ndim == num_batch + 4 else ()


def _sizes_here(layout: Layout, ragged: str, sizes):
    """Return the number of rows of each group that this device has."""
    if ragged not in layout.divided:
        return sizes
    total, here = layout.extents[ragged], layout.shard_extent(ragged)
    ends = jnp.clip(ends_of_groups(sizes, total) - layout.start(ragged), 0, here)
    return jnp.diff(ends, axis=-1, prepend=0).astype(sizes.dtype)


def ends_of_groups(sizes, num_rows: int) -> jax.Array:
    """Return the end of each group among `num_rows` rows, as int32."""
    # Group sizes may add up to more rows than exist, so sums are clipped; uint32 does not overflow.
    rows = jnp.clip(sizes, 0, num_rows).astype(np.uint32)
    add = functools.partial(_add_up_to, jnp.asarray(num_rows).astype(np.uint32))
    return lax.associative_scan(add, rows, axis=rows.ndim - 1).astype(np.int32)


def _add_up_to(limit, x, y):
    return jnp.minimum(x + y, limit)
