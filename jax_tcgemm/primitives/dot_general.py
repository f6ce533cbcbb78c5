"""The primitive `tcgemm_dot_general`: a dot_general whose result may be in any order.

    out = transpose(dot_general(lhs, rhs, dimension_numbers), permutation)

The permutation closes the primitive under differentiation and batching: the gradient of an operand
comes out in the operand's own order, so that no rule here ever emits a transpose, and what is a
layout stays one until the device-local code turns it into strides.

Parameters, all static: options (`CallOptions`, which derivatives inherit), dimension_numbers,
permutation, precision (canonical), preferred_element_type, out_sharding (of the permuted result).
"""

import functools
import math

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core.primitives import transpose_p

from jax_tcgemm import selection
from jax_tcgemm.device.dense import call as dense_call
from jax_tcgemm.device.dense import plan as dense_plan
from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.dense.of_xla import LaxProduct
from jax_tcgemm.primitives import lowering
from jax_tcgemm.primitives.rules import as_cotangent, bilinear_series, moved, same_varying
from jax_tcgemm.primitives.transposes import ProductLayout, Reading
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.sharding import partitioning, shardings
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching, product_type, xla

dot_general_p = core.Primitive("tcgemm_dot_general")


def dot_general(
    lhs,
    rhs,
    *,
    options: CallOptions,
    dimension_numbers,
    permutation=None,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
):
    """Binds the primitive; arguments are checked and canonical already."""
    jax_internals.register_imported()
    if permutation is None:
        # Residuals of derivatives may be Python scalars, which have no `ndim`.
        ndims = np.ndim(lhs), np.ndim(rhs)
        permutation = tuple(range(result_ndim(*ndims, dimension_numbers)))
    return dot_general_p.bind(
        *same_varying(lhs, rhs),
        options=options,
        dimension_numbers=dimension_numbers,
        permutation=tuple(permutation),
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


def result_type(lhs, rhs, **params) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what `dot_general` returns, of a product that is not part of a program."""
    with selection.unseen():
        return jax.eval_shape(functools.partial(dot_general, **params), lhs, rhs)


def result_ndim(lhs_ndim: int, rhs_ndim: int, dimension_numbers) -> int:
    """The number of dimensions of a product."""
    (contract, _), (batch, _) = dimension_numbers
    return lhs_ndim + rhs_ndim - 2 * len(contract) - len(batch)


# --- typing -------------------------------------------------------------------------------------


def _abstract_eval(lhs, rhs, **params):
    permutation = params["permutation"]
    with lowering.named(params["options"].function):
        out = product_type(
            lhs,
            rhs,
            dimension_numbers=params["dimension_numbers"],
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
            out_sharding=shardings.natural(params["out_sharding"], permutation),
        )
    if permutation != tuple(range(out.ndim)):
        out, _ = transpose_p.abstract_eval(out, permutation=permutation)
    lowering.expect(dense_plan.make_plan, product_of, lhs, rhs, out, params)
    return out


dot_general_p.def_impl(functools.partial(xla.apply_primitive, dot_general_p))
dot_general_p.def_abstract_eval(_abstract_eval)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, dimension_numbers, permutation, out_sharding, **params):
    """A dimension of both operands becomes a batch dimension, of one a free one; nothing moves."""
    (lhs, rhs), (lhs_dim, rhs_dim) = args, dims
    if lhs_dim is None and rhs_dim is None:
        out = dot_general_p.bind(
            lhs,
            rhs,
            dimension_numbers=dimension_numbers,
            permutation=permutation,
            out_sharding=out_sharding,
            **params,
        )
        return out, None
    new_numbers, order, position = batched_numbers(
        (np.ndim(lhs), np.ndim(rhs)), dims, dimension_numbers, permutation
    )
    out = dot_general_p.bind(
        lhs,
        rhs,
        dimension_numbers=new_numbers,
        permutation=order,
        out_sharding=shardings.with_dimension(
            out_sharding, position, len(order), axis_data.explicit_mesh_axis
        ),
        **params,
    )
    return out, position


def batched_numbers(ndims, dims, dimension_numbers, permutation):
    """A product one of whose operands at least has one more dimension.

    Args:
      ndims: dimensions of the operands, the new ones included.
      dims: for each operand the new dimension, or None.
      dimension_numbers: of the product without it.
      permutation: of the product without it.

    Returns:
      The dimension numbers and permutation of the product, and the new dimension of the result.
    """
    (lhs_ndim, rhs_ndim), (lhs_dim, rhs_dim) = ndims, dims
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_contract, lhs_batch = _bump(lhs_contract, lhs_dim), _bump(lhs_batch, lhs_dim)
    rhs_contract, rhs_batch = _bump(rhs_contract, rhs_dim), _bump(rhs_batch, rhs_dim)
    if lhs_dim is not None and rhs_dim is not None:
        lhs_batch, rhs_batch = (lhs_dim, *lhs_batch), (rhs_dim, *rhs_batch)
    new_numbers = ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))

    lhs_axes, rhs_axes = _natural_axes(lhs_ndim, rhs_ndim, new_numbers)
    if lhs_dim is not None:
        own, mapped = lhs_axes, lhs_dim
        neighbors = lhs_batch if rhs_dim is not None else own
    else:
        own, mapped, neighbors = rhs_axes, rhs_dim, rhs_axes
    new_axis = own[mapped]
    # Next to its neighbor in memory, where both may fold into one extent; in front otherwise.
    order = [axis + (axis >= new_axis) for axis in permutation]
    if mapped + 1 in neighbors:
        position = order.index(own[mapped + 1])
    elif mapped - 1 in neighbors:
        position = order.index(own[mapped - 1]) + 1
    else:
        position = 0
    order.insert(position, new_axis)
    return new_numbers, tuple(order), position


def _bump(axes, dim):
    """`axes` after a new dimension `dim` was inserted."""
    return tuple(axes) if dim is None else tuple(axis + (axis >= dim) for axis in axes)


def _natural_axes(lhs_ndim, rhs_ndim, dimension_numbers):
    """For each operand, {its axis: axis of dot_general's result}, contracted axes left out."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_axes = {axis: i for i, axis in enumerate(lhs_batch)}
    rhs_axes = {axis: i for i, axis in enumerate(rhs_batch)}
    position = len(lhs_batch)
    for axes, ndim, contract in (
        (lhs_axes, lhs_ndim, lhs_contract),
        (rhs_axes, rhs_ndim, rhs_contract),
    ):
        for axis in range(ndim):
            if axis not in axes and axis not in contract:
                axes[axis] = position
                position += 1
    return lhs_axes, rhs_axes


batching.fancy_primitive_batchers[dot_general_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _transpose_lhs(g, x, y, **params):
    return _transpose_operand(g, x, y, **params)


def _transpose_rhs(g, x, y, **params):
    return _transpose_operand(g, y, x, is_rhs=True, **params)


def _transpose_operand(
    g,
    x,
    y,
    *,
    options,
    dimension_numbers,
    permutation,
    precision,
    preferred_element_type,
    out_sharding,
    is_rhs=False,
):
    """The cotangent of x, in x's own order: a product of g and y over y's free dimensions.

    It inherits the implementation, which must then be able to run it, but not the config: that
    was asked for a product of another shape.
    """
    del out_sharding
    operands = (y, g) if is_rhs else (g, y)
    numbers, order = cotangent_numbers(
        x.aval.ndim, np.ndim(y), dimension_numbers, permutation, is_rhs=is_rhs
    )
    x_bar = dot_general(
        *operands,
        options=options.without_config(),
        dimension_numbers=numbers,
        permutation=order,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=shardings.of_cotangent(x.aval),
    )
    return as_cotangent(x_bar, x.aval)


def cotangent_numbers(x_ndim, y_ndim, dimension_numbers, permutation, *, is_rhs):
    """The product that gives the cotangent of one operand, x, in x's own order.

    Args:
      x_ndim: dimensions of x.
      y_ndim: dimensions of the other operand, y.
      dimension_numbers: of the product.
      permutation: of the product.
      is_rhs: whether x is the right operand.

    Returns:
      The dimension numbers and permutation of a product of (g, y), or (y, g) when `is_rhs`, where g
      is the cotangent of the result: y keeps its side, so that dW = dot(x, g).
    """
    if is_rhs:
        y_axes, x_axes = _natural_axes(y_ndim, x_ndim, dimension_numbers)
        (y_contract, x_contract), (y_batch, x_batch) = dimension_numbers
    else:
        x_axes, y_axes = _natural_axes(x_ndim, y_ndim, dimension_numbers)
        (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
    in_g = {natural: axis for axis, natural in enumerate(permutation)}
    y_free = [axis for axis in y_axes if axis not in y_batch]
    g_contract = tuple(in_g[y_axes[axis]] for axis in y_free)
    g_batch = tuple(in_g[x_axes[axis]] for axis in x_batch)
    g_ndim = len(permutation)
    if is_rhs:
        numbers = ((tuple(y_free), g_contract), (tuple(y_batch), g_batch))
        other_axes, g_axes = _natural_axes(y_ndim, g_ndim, numbers)
    else:
        numbers = ((g_contract, tuple(y_free)), (g_batch, tuple(y_batch)))
        g_axes, other_axes = _natural_axes(g_ndim, y_ndim, numbers)
    contracted = dict(zip(x_contract, y_contract, strict=True))
    order = tuple(
        other_axes[contracted[axis]] if axis in contracted else g_axes[in_g[x_axes[axis]]]
        for axis in range(x_ndim)
    )
    return numbers, order


ad.defbilinear(dot_general_p, _transpose_lhs, _transpose_rhs)


jax_internals.register_jet(dot_general_p, functools.partial(bilinear_series, dot_general_p))


# --- other interpreters of JAX ------------------------------------------------------------------


def _to_lax(params):
    """The parameters of `lax.dot_general_p`, and how its result is permuted."""
    keys = ("dimension_numbers", "precision", "preferred_element_type")
    permutation = params["permutation"]
    out_sharding = shardings.natural(params["out_sharding"], permutation)
    return {key: params[key] for key in keys} | {"out_sharding": out_sharding}, permutation


def flops(lhs, rhs, *, dimension_numbers, **_) -> int:
    """Multiplications and additions of a product."""
    (contract, _), (batch, _) = dimension_numbers
    shared = math.prod(lhs.shape[axis] for axis in (*contract, *batch))
    return 2 * lhs.size * rhs.size // shared if shared else 0


jax_internals.register_sparse_product(dot_general_p, _to_lax)
jax_internals.register_roofline(dot_general_p, flops)


# --- lowering -----------------------------------------------------------------------------------


def product_of(lhs, rhs, out, params) -> dense.Product:
    """Describe one call to its planner, from the types of operands and result, and params."""
    return dense.Product(
        options=params["options"],
        lhs_shape=tuple(lhs.shape),
        lhs_dtype=np.dtype(lhs.dtype),
        rhs_shape=tuple(rhs.shape),
        rhs_dtype=np.dtype(rhs.dtype),
        result_shape=tuple(out.shape),
        result_dtype=np.dtype(out.dtype),
        dimension_numbers=params["dimension_numbers"],
        permutation=params["permutation"],
        precision=params["precision"],
    )


def names_of(lhs_ndim: int, rhs_ndim: int, dimension_numbers, permutation):
    """Name the dimensions of lhs, rhs and the product, each of which devices may divide."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_names = {axis: f"m{axis}" for axis in range(lhs_ndim)}
    rhs_names = {axis: f"n{axis}" for axis in range(rhs_ndim)}
    for kind, lhs_axes, rhs_axes in (
        ("k", lhs_contract, rhs_contract),
        ("b", lhs_batch, rhs_batch),
    ):
        for i, (lhs_axis, rhs_axis) in enumerate(zip(lhs_axes, rhs_axes, strict=True)):
            lhs_names[lhs_axis] = rhs_names[rhs_axis] = f"{kind}{i}"
    lhs_axes, rhs_axes = _natural_axes(lhs_ndim, rhs_ndim, dimension_numbers)
    natural = {position: lhs_names[axis] for axis, position in lhs_axes.items()}
    natural |= {position: rhs_names[axis] for axis, position in rhs_axes.items()}
    names = tuple(natural[axis] for axis in permutation)
    return tuple(lhs_names.values()), tuple(rhs_names.values()), names


def division_of(lhs, rhs, params) -> partitioning.Division:
    """How a call may be sharded over devices: along every dimension."""
    layout = params["dimension_numbers"], params["permutation"]
    of_lhs, of_rhs, names = names_of(lhs.ndim, rhs.ndim, *layout)
    return partitioning.Division(
        operands=(of_lhs, of_rhs),
        results=(names,),
        call=lambda lhs, rhs: (dot_general(lhs, rhs, **params | {"out_sharding": None}),),
    )


def _lower(ctx, lhs, rhs, *, device, obstacle, **params):
    (out,) = ctx.avals_out
    product = product_of(*ctx.avals_in, out, params)
    if not obstacle and partitioning.is_divided(ctx) and dense.is_covered(product, device.platform):
        return partitioning.lower(ctx, (lhs, rhs), division_of(*ctx.avals_in, params))
    plan = dense_plan.make_plan(product.of_values((lhs, rhs)), device, obstacle)
    asked = LaxProduct.of(plan.product)
    if plan.is_dot_of_xla and _is_plain(asked, *ctx.avals_in, out):
        operands = (rhs, lhs) if asked.exchanged else (lhs, rhs)
        return (lowering.dot_general(*operands, asked),)
    out_sharding = shardings.natural(params["out_sharding"], asked.permutation)

    def on_device(lhs, rhs):
        if plan.repeats_row:
            return (_first_of_two_rows(lhs, rhs, **params),)
        return (dense_call.dot_general(lhs, rhs, plan, out_sharding),)

    key = lowering.key_of(dot_general_p, params, plan)
    return partitioning.lower_on_device(ctx, on_device, lhs, rhs, key=key)


def _first_of_two_rows(lhs, rhs, *, dimension_numbers, permutation, out_sharding, **params):
    """A product of one row that is there twice, in the layout that more rows have."""
    del out_sharding
    (contract, _), (batch, _) = dimension_numbers
    place = next((axis for axis in range(lhs.ndim) if axis not in (*contract, *batch)), 0)
    numbers, order, position = batched_numbers(
        (lhs.ndim + 1, rhs.ndim), (place, None), dimension_numbers, permutation
    )
    lhs = moved(lhs, None, place, 2)
    out = dot_general(lhs, rhs, dimension_numbers=numbers, permutation=order, **params)
    return lax.index_in_dim(out, 0, position, keepdims=False)


def _is_plain(asked: LaxProduct, *avals) -> bool:
    """Whether XLA's own product is one operation and a transpose, with no dtype or mesh to mind."""
    return (
        (asked.precision is None or type(asked.precision) is tuple)  # A DotAlgorithm is one, too.
        and len({aval.dtype for aval in avals}) == 1
        and all(aval.sharding.mesh.empty for aval in avals)
        and all(isinstance(extent, int) for aval in avals for extent in aval.shape)
    )


def _layout_of(params) -> ProductLayout:
    return ProductLayout(params["dimension_numbers"], params["permutation"])


def _with_layout(params, layout: ProductLayout) -> dict:
    numbers, permutation, _ = layout
    return params | {"dimension_numbers": numbers, "permutation": permutation}


READING = Reading(_layout_of, _with_layout)

lowering.register(dot_general_p, _lower, READING)
