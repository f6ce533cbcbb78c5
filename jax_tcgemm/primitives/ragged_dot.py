"""The primitive `tcgemm_ragged_dot`: products over groups of consecutive rows.

    rows         out[b, i, n] = sum_k lhs[b, i, k] * rhs[b, g, k, n] for the rows i of group g
                 lhs (*b, m, k), rhs (*b, g, k, n) or, rhs_transposed, (*b, g, n, k)
    contraction  out[b, g, m, n] = sum over the rows i of group g of lhs[b, i, m] * rhs[b, i, n]
                 lhs (*b, k, m), rhs (*b, k, n)

Operands are lhs, rhs, group_sizes (*b, s) and group_offset (*b, 1); all have the same number of
batch dimensions, each of size 1 where it is broadcast. The two forms are closed under
differentiation: each one's gradients are the other or itself.

Parameters, all static: form, rhs_transposed, groups (of rhs or of the result), precision
(canonical), preferred_element_type, implementation, config.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir, xla

from jax_tcgemm import local, local_ragged, selection
from jax_tcgemm.primitives import partitioning, ragged_division
from jax_tcgemm.primitives.dot_general import obstacle_of, same_varying
from jax_tcgemm.primitives.ragged_division import result_spec

ragged_dot_p = core.Primitive("tcgemm_ragged_dot")

# The function that messages name: a call does not know which public one bound it.
OP = "ragged_dot"


def ragged_dot(
    lhs,
    rhs,
    group_sizes,
    group_offset,
    *,
    form="rows",
    rhs_transposed=False,
    groups,
    precision=None,
    preferred_element_type=None,
    implementation=None,
    config=None,
):
    """Binds the primitive; arguments are checked and canonical already."""
    return ragged_dot_p.bind(
        *same_varying(lhs, rhs, group_sizes, group_offset),
        form=form,
        rhs_transposed=rhs_transposed,
        groups=groups,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
        config=config,
    )


# --- typing -------------------------------------------------------------------------------------


def _abstract_eval(lhs, rhs, group_sizes, group_offset, **params):
    num_batch = group_sizes.ndim - 1
    batch = np.broadcast_shapes(
        *(x.shape[:num_batch] for x in (lhs, rhs, group_sizes, group_offset))
    )
    product = _extents(lhs, rhs, params)
    groups = (params["groups"],) if params["form"] == "contraction" else ()
    dtype = jax.eval_shape(
        functools.partial(lax.dot, preferred_element_type=params["preferred_element_type"]),
        *(jax.ShapeDtypeStruct((1, 1), x.dtype) for x in (lhs, rhs)),
    ).dtype
    shape = (*batch, *groups, product["m"], product["n"])
    sharding = lhs.sharding.update(spec=result_spec(lhs, rhs, params, len(shape)))
    return lhs.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _extents(lhs, rhs, params) -> dict:
    """m, n and k, as RaggedProblem names them."""
    if params["form"] == "contraction":
        return {"m": lhs.shape[-1], "n": rhs.shape[-1], "k": lhs.shape[-2]}
    n = rhs.shape[-2 if params["rhs_transposed"] else -1]
    return {"m": lhs.shape[-2], "n": n, "k": lhs.shape[-1]}


ragged_dot_p.def_impl(functools.partial(xla.apply_primitive, ragged_dot_p))
ragged_dot_p.def_abstract_eval(_abstract_eval)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, **params):
    """A mapped dimension becomes the first batch dimension, of size 1 where it is not mapped."""
    del axis_data
    if all(dim is None for dim in dims):
        return ragged_dot_p.bind(*args, **params), None
    args = [
        lax.expand_dims(x, (0,)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]
    return ragged_dot_p.bind(*args, **params), 0


batching.fancy_primitive_batchers[ragged_dot_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, **params):
    lhs, rhs, *groups = primals
    out = ragged_dot_p.bind(*primals, **params)
    parts = []
    for tangent, bind in (
        (tangents[0], lambda t: ragged_dot_p.bind(*same_varying(t, rhs, *groups), **params)),
        (tangents[1], lambda t: ragged_dot_p.bind(*same_varying(lhs, t, *groups), **params)),
    ):
        if type(tangent) is not ad.Zero:
            parts.append(bind(tangent))
    if not parts:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(lax.add, parts)


def _transpose(ct, lhs, rhs, *group_operands, **params):
    """The cotangent of lhs or of rhs, whichever is to be differentiated, by one grouped product.

    It inherits the implementation, which must then be able to run it, but not the config: that
    was asked for a product of another shape.
    """
    is_lhs = ad.is_undefined_primal(lhs)
    aval = (lhs if is_lhs else rhs).aval
    if type(ct) is ad.Zero:
        bar = ad.Zero(aval)
    else:
        operands, form, transposed = _cotangent_product(ct, lhs, rhs, is_lhs, params)
        bar = ragged_dot(
            *operands,
            *group_operands,
            **params | {"form": form, "rhs_transposed": transposed, "config": None},
        )
        num_batch = jnp.ndim(group_operands[0]) - 1
        repeated = [i for i in range(num_batch) if aval.shape[i] == 1 != bar.shape[i]]
        bar = jnp.sum(bar, repeated, keepdims=True) if repeated else bar
        bar = partitioning.resharded(lax.convert_element_type(bar, aval.dtype), aval.sharding)
    return [bar, None, None, None] if is_lhs else [None, bar, None, None]


def _cotangent_product(ct, lhs, rhs, is_lhs, params):
    """The operands, the form and the layout of the product that gives a cotangent."""
    if params["form"] == "contraction":
        # Both gradients go over the rows again, each with the groups of ct.
        return ((rhs, ct), "rows", True) if is_lhs else ((lhs, ct), "rows", False)
    if is_lhs:
        return (ct, rhs), "rows", not params["rhs_transposed"]
    return ((ct, lhs) if params["rhs_transposed"] else (lhs, ct)), "contraction", False


ad.primitive_jvps[ragged_dot_p] = _jvp
ad.primitive_transposes[ragged_dot_p] = _transpose


# --- lowering -----------------------------------------------------------------------------------


def product_of(lhs, rhs, group_sizes, group_offset, out, params) -> local_ragged.Product:
    """What one call of the primitive says, from the types of its operands and result."""
    num_batch = group_sizes.ndim - 1
    sizes_batch = np.broadcast_shapes(group_sizes.shape[:-1], group_offset.shape[:-1])
    return local_ragged.Product(
        form=params["form"],
        batches=(lhs.shape[:num_batch], rhs.shape[:num_batch], sizes_batch),
        **_extents(lhs, rhs, params),
        groups=(out if params["form"] == "contraction" else rhs).shape[num_batch],
        num_sizes=group_sizes.shape[-1],
        rhs_transposed=params["rhs_transposed"],
        lhs_dtype=np.dtype(lhs.dtype),
        rhs_dtype=np.dtype(rhs.dtype),
        result_dtype=np.dtype(out.dtype),
        precision=params["precision"],
        implementation=params["implementation"],
        config=params["config"],
    )


def division_of(lhs, rhs, group_sizes, group_offset, params) -> partitioning.Division:
    """How a call may be divided over devices."""
    operands = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes, "group_offset": group_offset}
    return ragged_division.division_of(ragged_dot, operands, params)


def _lower(ctx, *args, platform, **params):
    out_aval = ctx.avals_out[0]
    obstacle = obstacle_of(platform, *ctx.avals_in, out_aval)
    obstacle = obstacle or partitioning.obstacle_to_automatic(ctx)
    product = product_of(*ctx.avals_in, out_aval, params)
    if not obstacle and partitioning.is_divided(ctx) and local.is_covered(product, platform):
        return partitioning.lower(ctx, args, division_of(*ctx.avals_in, params))
    plan = local_ragged.make_plan(
        OP, product, platform, selection.target_device(platform), obstacle
    )

    def on_device(*operands):
        return (local_ragged.ragged_dot(*operands, plan),)

    return partitioning.lower_on_device(ctx, on_device, *args)


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(
        ragged_dot_p, functools.partial(_lower, platform=_platform), platform=_platform
    )


def _lower_elsewhere(ctx, *args, **params):
    platforms = ctx.platforms or ctx.module_context.platforms
    return _lower(ctx, *args, platform="/".join(platforms), **params)


mlir.register_lowering(ragged_dot_p, _lower_elsewhere)
