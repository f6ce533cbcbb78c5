"""The primitive `tcgemm_ragged_dot`: products over groups of consecutive rows.

    rows         out[b, i, n] = sum_k lhs[b, i, k] * rhs[b, g, k, n]
                 for the rows i of group g, else 0
                 lhs (*b, m, k), rhs (*b, g, k, n) or, rhs_transposed, (*b, g, n, k)
    contraction  out[b, g, m, n] = sum over the rows i of group g of lhs[b, i, m] * rhs[b, i, n]
                 lhs (*b, k, m), rhs (*b, k, n)

Operands are lhs, rhs, group_sizes (*b, s), group_offset (*b, 1) and, where gathered, gather
(*b, rows of the product): row i is then lhs[gather[i]]. Sizes, offset and indices are int32. All
have the same number of batch dimensions, each of size 1 where it is broadcast.

The two forms are closed under differentiation: each one's gradients are the other or itself.

Parameters, all static: options, form, rhs_transposed, groups (of rhs or of the result), gathered,
precision (canonical), preferred_element_type, out_sharding (None follows lhs and rhs).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding

from jax_tcgemm import selection
from jax_tcgemm.device import grouped
from jax_tcgemm.device import rows as device_rows
from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.primitives import lowering, rows
from jax_tcgemm.primitives.rules import as_cotangent, bilinear_series, same_varying
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.sharding import partitioning, ragged_division, shardings
from jax_tcgemm.sharding.ragged_division import result_spec
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching, xla, zero_tangent

ragged_dot_p = core.Primitive("tcgemm_ragged_dot")


def _gathers_anything(options: CallOptions) -> bool:
    """Whether what may run the call gathers rows in any form or has them taken first."""
    return options.implementation == "host" or selection.may_be_unfused(options)


def ragged_dot(
    lhs,
    rhs,
    group_sizes,
    group_offset,
    gather=None,
    *,
    options: CallOptions,
    form="rows",
    rhs_transposed=False,
    groups,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
):
    """Binds the primitive; arguments are checked and canonical already."""
    jax_internals.register_imported()
    extra = () if gather is None else (gather,)
    return ragged_dot_p.bind(
        *same_varying(lhs, rhs, group_sizes, group_offset, *extra),
        options=options,
        form=form,
        rhs_transposed=rhs_transposed,
        groups=groups,
        gathered=gather is not None,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


class RaggedOperands(NamedTuple):
    """Operands of a grouped product by name; a call has those that are not None, in this order.

    Only products with an epilogue have scales (encodings/ragged_block_scaled.py).
    """

    lhs: object
    rhs: object
    group_sizes: object
    group_offset: object
    gather: object = None
    lhs_scales: object = None
    rhs_scales: object = None

    @property
    def given(self) -> tuple:
        """Return the operands that are not None."""
        return tuple(x for x in self if x is not None)


# --- typing -------------------------------------------------------------------------------------


def _abstract_eval(*args, **params):
    num_batch = args[2].ndim - 1
    batch = np.broadcast_shapes(*(x.shape[:num_batch] for x in args))
    operands = RaggedOperands(*args)
    extents = _extents(operands, params)
    groups = (params["groups"],) if params["form"] == "contraction" else ()
    with lowering.named(params["options"].function):
        dtype = jax.eval_shape(
            functools.partial(lax.dot, preferred_element_type=params["preferred_element_type"]),
            *(jax.ShapeDtypeStruct((1, 1), x.dtype) for x in (operands.lhs, operands.rhs)),
        ).dtype
    shape = (*batch, *groups, extents["m"], extents["n"])
    lhs = operands.lhs
    sharding = params["out_sharding"]
    if sharding is None:
        spec = result_spec(lhs, operands.rhs, params, len(shape))
        sharding = NamedSharding(lhs.sharding.mesh, spec)
    out = jax_internals.like(lhs, shape, dtype, sharding)
    lowering.expect(grouped.make_plan, product_of, *args, out, params)
    return out


def _extents(operands: RaggedOperands, params) -> dict:
    """m, n and k, as RaggedProblem names them."""
    lhs, rhs = operands.lhs, operands.rhs
    tokens = lhs.shape[-2] if operands.gather is None else operands.gather.shape[-1]
    if params["form"] == "contraction":
        return {"m": lhs.shape[-1], "n": rhs.shape[-1], "k": tokens}
    n = rhs.shape[-2 if params["rhs_transposed"] else -1]
    return {"m": tokens, "n": n, "k": lhs.shape[-1]}


ragged_dot_p.def_impl(functools.partial(xla.apply_primitive, ragged_dot_p))
ragged_dot_p.def_abstract_eval(_abstract_eval)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, **params):
    """A mapped dimension becomes the first batch dimension, of size 1 where it is not mapped."""
    if all(dim is None for dim in dims):
        return ragged_dot_p.bind(*args, **params), None
    args = [
        lax.expand_dims(x, (0,)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]
    ndim = args[2].ndim + (2 if params["form"] == "contraction" else 1)
    params["out_sharding"] = shardings.with_dimension(
        params["out_sharding"], 0, ndim, axis_data.explicit_mesh_axis
    )
    return ragged_dot_p.bind(*args, **params), 0


batching.fancy_primitive_batchers[ragged_dot_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, **params):
    out = ragged_dot_p.bind(*primals, **params)
    addends = []
    for i in range(2):
        if type(tangents[i]) is not ad.Zero:
            operands = [*primals]
            operands[i] = tangents[i]
            addends.append(ragged_dot_p.bind(*same_varying(*operands), **params))
    if not addends:
        return out, zero_tangent(out)
    return out, functools.reduce(lax.add, addends)


def _transpose(ct, *args, **params):
    """The cotangent of lhs or of rhs, whichever is to be differentiated, by one grouped product.

    It inherits the implementation, which must then be able to run it, but not the config: that
    was asked for a product of another shape.
    """
    is_lhs = ad.is_undefined_primal(args[0])
    aval = args[0 if is_lhs else 1].aval
    if type(ct) is ad.Zero:
        bar = ad.Zero(aval)
    else:
        batch = np.broadcast_shapes(*(_aval(x).shape[: jnp.ndim(args[2]) - 1] for x in args))
        repeated = [i for i, extent in enumerate(batch) if aval.shape[i] != extent]
        sharding = None if repeated else shardings.of_cotangent(aval)
        bar = _cotangent(ct, RaggedOperands(*args), is_lhs, sharding, params)
        bar = jnp.sum(bar, repeated, keepdims=True) if repeated else bar
        bar = partitioning.resharded(as_cotangent(bar, aval), aval.sharding)
    others = [None] * (len(args) - 2)
    return [bar, None, *others] if is_lhs else [None, bar, *others]


def _aval(x):
    return x.aval if ad.is_undefined_primal(x) else jax.typeof(x)


def _cotangent(ct, operands: RaggedOperands, is_lhs: bool, out_sharding, params) -> jax.Array:
    lhs, rhs, gather = operands.lhs, operands.rhs, operands.gather
    groups = operands.group_sizes, operands.group_offset
    options = params["options"].without_config()
    keys = ("groups", "precision", "preferred_element_type")
    bind = functools.partial(ragged_dot, options=options, **{key: params[key] for key in keys})
    is_contraction, transposed = params["form"] == "contraction", params["rhs_transposed"]
    if is_lhs:
        # Of a contraction, over the rows again, each with ct of its group.
        x, y, flipped = (rhs, ct, True) if is_contraction else (ct, rhs, not transposed)
        if gather is None:
            return bind(x, y, *groups, rhs_transposed=flipped, out_sharding=out_sharding)
        bar = bind(x, y, *groups, rhs_transposed=flipped)
        return _add_rows(options, bar, gather, lhs.aval.shape[-2])
    bind = functools.partial(bind, out_sharding=out_sharding)
    if is_contraction:
        return bind(lhs, ct, *groups, gather)
    # Only the first operand of a contraction can be gathered, and by no kernel that is asked for.
    if gather is not None and (transposed or not _gathers_anything(options)):
        lhs, gather = take_rows(options.selecting(), lhs, gather), None
    if transposed:
        return bind(ct, lhs, *groups, form="contraction")
    return bind(lhs, ct, *groups, gather, form="contraction")


def take_rows(options: CallOptions, x, gather):
    """x[..., gather[i], :], zero for an index out of range; a sum of one row for each."""

    def take(x, indices):
        (count,) = indices.shape
        own = lax.iota(indices.dtype, count)
        how = {"options": options, "patterns": (None, 1)}
        return rows.sums(x, indices, own, num_targets=count, **how)

    return over_batch(take, x, gather)


def _add_rows(options: CallOptions, x, gather, num_rows: int):
    """The transpose of `take_rows`: out[gather[i]] is the sum of all its x[i]."""

    def add(x, indices):
        own = lax.iota(indices.dtype, *indices.shape)
        how = {"options": options.selecting(), "patterns": (1, None)}
        return rows.sums(x, own, indices, num_targets=num_rows, **how)

    return over_batch(add, x, gather)


def over_batch(f, x, gather):
    """f(x, indices) for each index of the batch dimensions, in which both broadcast."""
    batch = np.broadcast_shapes(x.shape[:-2], gather.shape[:-1])
    x = jnp.broadcast_to(x, (*batch, *x.shape[-2:]))
    gather = jnp.broadcast_to(gather, (*batch, gather.shape[-1]))
    for _ in batch:
        f = jax.vmap(f)
    return f(x, gather)


ad.primitive_jvps[ragged_dot_p] = _jvp
ad.primitive_transposes[ragged_dot_p] = _transpose


def _series(primals, series, **params):
    return bilinear_series(ragged_dot_p, primals, series, **params)


jax_internals.register_jet(ragged_dot_p, _series)


# --- other interpreters of JAX ------------------------------------------------------------------


def flops(*args, **params) -> int:
    """Count the operations of all rows, as if each belonged to a group."""
    operands = RaggedOperands(*args)
    batch = np.broadcast_shapes(*(x.shape[: args[2].ndim - 1] for x in args))
    return 2 * math.prod((*batch, *_extents(operands, params).values()))


jax_internals.register_roofline(ragged_dot_p, flops)


# --- lowering -----------------------------------------------------------------------------------


def product_of(*avals_and_params) -> grouped.Product:
    """Describe one call to its planner, from the types of operands and result, and params."""
    *args, out, params = avals_and_params
    operands = RaggedOperands(*args)
    num_batch = operands.group_sizes.ndim - 1

    def batch(*names):
        shapes = [getattr(operands, name) for name in names]
        return np.broadcast_shapes(*(x.shape[:num_batch] for x in shapes if x is not None))

    # Of a device that has some of the groups, fewer than the parameters say.
    groups = (out if params["form"] == "contraction" else operands.rhs).shape[num_batch]
    return grouped.Product(
        options=params["options"],
        form=params["form"],
        batches=(
            batch("lhs"),
            batch("rhs"),
            batch("group_sizes", "group_offset", "gather"),
        ),
        **_extents(operands, params),
        groups=groups,
        num_sizes=operands.group_sizes.shape[-1],
        rhs_transposed=params["rhs_transposed"],
        gathered_rows=None if operands.gather is None else operands.lhs.shape[-2],
        lhs_dtype=np.dtype(operands.lhs.dtype),
        rhs_dtype=np.dtype(operands.rhs.dtype),
        result_dtype=np.dtype(out.dtype),
        precision=params["precision"],
    )


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be sharded over devices."""
    *args, params = avals_and_params
    operands = {k: x for k, x in RaggedOperands(*args)._asdict().items() if x is not None}
    return ragged_division.division_of(ragged_dot, operands, params)


def _gathered_first(operands: RaggedOperands, params) -> jax.Array:
    """Gather the rows first, and multiply them by whichever implementation is selected."""
    taken = over_batch(device_rows.take, operands.lhs, operands.gather)
    groups = operands.group_sizes, operands.group_offset
    keys = ("form", "rhs_transposed", "groups", "precision", "preferred_element_type")
    return ragged_dot(
        taken,
        operands.rhs,
        *groups,
        options=params["options"].without_config(),
        **{key: params[key] for key in keys},
    )


def _lower(ctx, *args, device, obstacle, **params):
    out_aval = ctx.avals_out[0]
    product = product_of(*ctx.avals_in, out_aval, params)
    # XLA's own product has no rule for explicit axes.
    is_explicit = partitioning.has_explicit_axes(*ctx.avals_in)
    is_divisible = is_explicit or dense.is_covered(product, device.platform)
    if not obstacle and partitioning.is_divided(ctx) and is_divisible:
        return partitioning.lower(ctx, args, division_of(*ctx.avals_in, params))
    plan = grouped.make_plan(product, device, obstacle)

    def on_device(*args):
        operands = RaggedOperands(*args)
        if plan.flips_rhs:
            flipped = operands._replace(rhs=jnp.swapaxes(operands.rhs, -1, -2))
            own = params | {"rhs_transposed": False}
            return (ragged_dot_p.bind(*flipped.given, **own),)
        if plan.runs_by_xla and operands.gather is not None:
            return (_gathered_first(operands, params),)
        return (grouped.ragged_dot(*args, plan=plan),)

    if plan.runs_by_xla:
        on_device = partitioning.of_whole_arrays(on_device, out_aval)
    return partitioning.lower_on_device(ctx, on_device, *args)


lowering.register(ragged_dot_p, _lower)
