"""How grouped products divide over devices.

Every dimension but that of the group sizes may be divided. A device with some of the rows takes the
sizes of the groups' parts in them, one with some of the groups another group offset; rows of groups
that a device does not have are zero there, so that the sum over devices is that over their owners.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_tcgemm.sharding.layout import Layout, canonical_spec
from jax_tcgemm.sharding.partitioning import Division


def division_of(bind, operands: dict, params) -> Division:
    """The division of one call.

    Args:
      bind: the function that binds the primitive, by the names of `operands`.
      operands: types by name, in order: lhs, rhs, group_sizes, group_offset and what else there is.
      params: the primitive's parameters.
    """
    num_batch = operands["group_sizes"].ndim - 1
    is_contraction = params["form"] == "contraction"
    ragged, gather = ("k" if is_contraction else "m"), "gather" in operands
    # Rows that are gathered may be anywhere in lhs, so every device needs all.
    rows = "source" if gather else ragged
    own = {
        "lhs": (rows, "m" if is_contraction else "k"),
        "group_sizes": ("sizes",),
        "group_offset": ("one",),
        "gather": (ragged,),
        "bias": ("g", *_columns(params)),
    }
    if is_contraction:
        own["rhs"], result = ("k", "n"), ("g", "m", "n")
    else:
        matrix = ("n", "k") if params["rhs_transposed"] else ("k", *_columns(params))
        own["rhs"], result = ("g", *matrix), ("m", "n")
    batch = tuple(f"b{i}" for i in range(num_batch))
    extents = np.broadcast_shapes(*(aval.shape[:num_batch] for aval in operands.values()))
    names, broadcast = [], []
    for operand, aval in operands.items():
        # A batch dimension of size 1 that stands for a larger one has a name of its own.
        own_batch = [
            name if aval.shape[i] == extents[i] else f"{name}_{operand}"
            for i, name in enumerate(batch)
        ]
        broadcast += [name for name in own_batch if name not in batch]
        names.append((*own_batch, *own[operand]))
    # Bias and activation cannot wait for a sum over k without the groups of its rows.
    is_fused = "bias" in operands or params["gated"] or params["activation"] != "none"
    whole = ("sizes", "one", "source", "gate", *broadcast, *("k" if is_fused else ()))

    static = {
        key: value
        for key, value in params.items()
        if key not in ("biased", "gathered", "out_sharding")
    }

    def call(*shards):
        return (bind(**dict(zip(operands, shards, strict=True)), **static),)

    def call_at(layout: Layout):
        def call(*shards):
            here = dict(zip(operands, shards, strict=True))
            here["group_sizes"] = _sizes_here(layout, ragged, here["group_sizes"])
            # Groups count from the end nearest to an offset that is out of range, on every device.
            offset = jnp.clip(here["group_offset"], 0, here["group_sizes"].shape[-1])
            here["group_offset"] = offset + layout.start("g")
            return (bind(**here, **static | {"groups": layout.shard_extent("g")}),)

        return call

    return Division(
        operands=tuple(names),
        results=((*batch, *result),),
        call=call,
        call_at=call_at,
        whole=tuple(name for name in whole if any(name in own for own in names)),
        even=("g",),
    )


def result_spec(lhs, rhs, params, ndim: int) -> PartitionSpec:
    """How the result is divided over explicit mesh axes: like the dimensions it has of operands."""
    is_contraction = params["form"] == "contraction"
    n_axis = -2 if params["rhs_transposed"] and not is_contraction else -1
    m = lhs.sharding.spec.partitions[-1 if is_contraction else -2]
    n = rhs.sharding.spec.partitions[n_axis]
    m = None if params["gathered"] and not is_contraction else m
    (m_axes,), (n_axes,) = (canonical_spec(PartitionSpec(axes), 1) for axes in (m, n))
    return PartitionSpec(*[None] * (ndim - 2), m, None if {*m_axes} & {*n_axes} else n)


def _columns(params) -> tuple[str, ...]:
    return ("gate", "n") if params["gated"] else ("n",)


def _sizes_here(layout: Layout, ragged: str, sizes):
    """The parts of the groups' rows that are this device's."""
    if ragged not in layout.divided:
        return sizes
    total, here = layout.extents[ragged], layout.shard_extent(ragged)
    # Sizes may say more than there are rows, so sums stop there; unsigned ones cannot overflow.
    rows = jnp.clip(sizes, 0, total).astype(np.uint32)
    add = functools.partial(_add_up_to, np.uint32(total))
    ends = lax.associative_scan(add, rows, axis=rows.ndim - 1).astype(np.int32)
    ends = jnp.clip(ends - layout.start(ragged), 0, here)
    return jnp.diff(ends, axis=-1, prepend=0).astype(sizes.dtype)


def _add_up_to(limit, x, y):
    return jnp.minimum(x + y, limit)
