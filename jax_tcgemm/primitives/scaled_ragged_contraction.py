"""The primitive `tcgemm_scaled_ragged_contraction`: sums over the tokens of groups, of few bits.

    out[*b, g, m, n] = sum over the tokens i of group g of
        (lhs * lhs_scales)[*b, m, i] * (rhs * rhs_scales)[*b, n, i]

Operands are lhs (*b, m, k) and rhs (*b, n, k), of float8 or int8 and of one dtype, group_sizes
(*b, s), group_offset (*b, 1), lhs_scales and rhs_scales in float32, (*b, blocks of m or n, blocks
of k). All have the same number of batch dimensions, each of size 1 where it is broadcast. It is the
gradient of the matrices of a grouped product, both of whose operands are held transposed.

`unfused` is the same in JAX, by a plain product of dequantized operands: it types the primitive and
runs it wherever nothing takes it as one call.

Parameters, all static: options, groups, blocks (extents of a block of lhs along m and k, and of rhs
along n and k), preferred_element_type, precision (canonical).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import dense, grouped, grouped_contraction
from jax_tcgemm.primitives import functions
from jax_tcgemm.primitives import ragged_dot as plain
from jax_tcgemm.primitives.encodings.block_scaled import dequantized
from jax_tcgemm.primitives.rules import (
    is_moving,
    same_varying,
    series_by_parts,
    transpose_by_parts,
)
from jax_tcgemm.problem.block_scales import BlockScales
from jax_tcgemm.problem.precision import of_block_scales, of_dequantized
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching, zero_tangent

scaled_ragged_contraction_p = core.Primitive("tcgemm_scaled_ragged_contraction")
scaled_ragged_contraction_p.multiple_results = True

_F32 = np.dtype(np.float32)


def scaled_ragged_contraction(
    lhs, rhs, group_sizes, group_offset, lhs_scales, rhs_scales, **params
) -> jax.Array:
    """Binds the primitive; arguments are checked and canonical already."""
    jax_internals.register_imported()
    arrays = same_varying(lhs, rhs, group_sizes, group_offset, lhs_scales, rhs_scales)
    return scaled_ragged_contraction_p.bind(*arrays, **params)[0]


def unfused(
    lhs, rhs, sizes, offset, lhs_scales, rhs_scales, *, blocks, preferred_element_type, **params
) -> list[jax.Array]:
    """The same by a plain product and what XLA makes of the scales."""
    how = {
        "options": params["options"].of_dequantized_blocks(),
        "form": "contraction",
        "groups": params["groups"],
        "precision": of_dequantized(params["precision"]),
        "preferred_element_type": _F32,
    }
    scales = lhs_scales, rhs_scales
    if all(x.shape[-1] == 1 for x in scales):
        # bfloat16 has 8 bits exactly, and scales of rows may follow.
        values = [lax.optimization_barrier(x).astype(jnp.bfloat16) for x in (lhs, rhs)]
        acc = plain.ragged_dot(*(jnp.swapaxes(x, -1, -2) for x in values), sizes, offset, **how)
        own = zip((lhs, rhs), scales, blocks, strict=True)
        of_rows = [
            BlockScales((*x.shape[:-1], 1), scale.shape, block, 0).spread(scale)[..., None, :, :]
            for x, scale, block in own
        ]
        out = acc * of_rows[0] * jnp.swapaxes(of_rows[1], -1, -2)
    else:
        wide = [dequantized(*x) for x in zip((lhs, rhs), scales, blocks, strict=True)]
        out = plain.ragged_dot(*(jnp.swapaxes(x, -1, -2) for x in wide), sizes, offset, **how)
    return [out.astype(preferred_element_type)]


# --- batching, differentiation --------------------------------------------------------------------


def _batch(axis_data, args, dims, **params):
    """A mapped dimension becomes the first of the batch, of size 1 where it is not mapped."""
    del axis_data
    if all(dim is None for dim in dims):
        return scaled_ragged_contraction_p.bind(*args, **params), [None]
    args = [
        lax.expand_dims(x, (0,)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]
    for side in range(2):
        # Scales have the batch dimensions of what they scale.
        pair = side, 4 + side
        own = max(args[i].shape[0] for i in pair)
        for i in pair:
            args[i] = jnp.broadcast_to(args[i], (own, *args[i].shape[1:]))
    return scaled_ragged_contraction_p.bind(*args, **params), [0]


batching.fancy_primitive_batchers[scaled_ragged_contraction_p] = _batch


def _jvp(primals, tangents, **params):
    """As of a product of dequantized operands."""
    out = scaled_ragged_contraction_p.bind(*primals, **params)
    moving = [i for i, tangent in enumerate(tangents) if is_moving(tangent)]
    if not moving:
        return out, [zero_tangent(x) for x in out]

    def f(*values):
        operands = [*primals]
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return unfused(*operands, **params)

    _, moved = jax.jvp(f, [primals[i] for i in moving], [tangents[i] for i in moving])
    return out, moved


def _transpose(cotangents, *operands, **params):
    """Of a call that is linear in some operands: that of the unfused one."""
    return transpose_by_parts(unfused, cotangents, operands, **params)


def _series(primals, series, **params):
    return series_by_parts(unfused, primals, series, **params)


ad.primitive_jvps[scaled_ragged_contraction_p] = _jvp
ad.primitive_transposes[scaled_ragged_contraction_p] = _transpose
jax_internals.register_jet(scaled_ragged_contraction_p, _series)


def _flops(lhs, rhs, *_, **__) -> int:
    """Those of all tokens, as if each were of a group."""
    return 2 * lhs.size * rhs.shape[-2]


jax_internals.register_roofline(scaled_ragged_contraction_p, _flops)


# --- typing and lowering --------------------------------------------------------------------------


def product_of(*avals_and_params) -> grouped_contraction.Product:
    """What one call of the primitive says, from the types of its operands and its params."""
    *avals, params = avals_and_params
    lhs, rhs, sizes, offset, *scales = avals
    num_batch = sizes.ndim - 1
    precision = of_block_scales(params["precision"])

    def batch(*arrays):
        return np.broadcast_shapes(*(x.shape[:num_batch] for x in arrays))

    product = grouped.Product(
        options=params["options"],
        form="contraction",
        batches=(batch(lhs), batch(rhs), batch(sizes, offset)),
        m=lhs.shape[-2],
        n=rhs.shape[-2],
        k=lhs.shape[-1],
        groups=params["groups"],
        num_sizes=sizes.shape[-1],
        rhs_transposed=False,
        gated=False,
        gathered_rows=None,
        lhs_dtype=np.dtype(lhs.dtype),
        rhs_dtype=np.dtype(rhs.dtype),
        result_dtype=np.dtype(params["preferred_element_type"]),
        precision=precision,
    )
    own = zip((lhs, rhs), scales, params["blocks"], strict=True)
    return grouped_contraction.Product(
        product,
        tuple(BlockScales(tuple(x.shape), tuple(y.shape), z, num_batch) for x, y, z in own),
    )


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be divided: along m and n, where each has a scale of its own or all one."""
    *avals, params = avals_and_params
    num_batch = avals[2].ndim - 1
    batch = tuple(f"b{i}" for i in range(num_batch))
    extents = np.broadcast_shapes(*(x.shape[:num_batch] for x in avals))
    own = [("m", "k"), ("n", "k"), ("sizes",), ("one",)]
    whole = {"k", "sizes", "one", "g"}
    for side, name in enumerate("mn"):
        number, extent = avals[4 + side].shape[-2], avals[side].shape[-2]
        is_each = number == extent and number > 1
        own.append((name if is_each else f"rows{side}", f"k{side}"))
        whole |= {*own[-1]} - {name} | ({name} if number > 1 and not is_each else set())
    names = []
    for i, (aval, ending) in enumerate(zip(avals, own, strict=True)):
        # A batch dimension of size 1 that stands for a larger one has a name of its own.
        leading = [n if aval.shape[j] == extents[j] else f"{n}_{i}" for j, n in enumerate(batch)]
        whole |= {*leading} - {*batch}
        names.append((*leading, *ending))

    def run(*arguments):
        return tuple(scaled_ragged_contraction_p.bind(*arguments, **params))

    return partitioning.Division(
        operands=tuple(names),
        results=((*batch, "g", "m", "n"),),
        call=run,
        whole=tuple(sorted(whole)),
    )


def obstacle_to_division(operands, product, params, device: selection.Device) -> str:
    """Why a call is run unfused where devices divide it; "" where each makes a part of it."""
    del operands, params
    if not dense.is_covered(product.product, device.platform):
        return "no implementation covers the dtypes of the product"
    return ""


_rules = scaled_ragged_contraction_p, unfused, product_of
functions.define_types(*_rules)
functions.define_lowering(
    *_rules,
    division_of=division_of,
    obstacle_to_division=obstacle_to_division,
)
