"""Linear primitives that JVP rules bind, whose transposes are fused products.

    tcgemm_activated_tangent      out = dot_general(df, rhs), df the tangent of f(Z) for dZ + dbias
        its transpose is one product with a derivative as epilogue, dZ = f'(Z) * (g rhs^T), which
        also sums its columns for the bias
    tcgemm_accumulating_tangent   out = dot_general(lhs, drhs)
        its transpose adds to what a buffer holds, drhs = buffer + lhs^T g, in the buffer's dtype

In forward mode both are computed unfused.

Parameters, all static: options, dimension_numbers, permutation, precision, preferred_element_type,
out_sharding; of tcgemm_activated_tangent also activation, gate_up_axis (the axis of Z of size 2
that stacks gate and up, or None) and bias_axes (the axes of Z that dbias has, or None).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives.encodings.plain import Plain
from jax_tcgemm.primitives.epilogue_product import with_layer
from jax_tcgemm.primitives.rules import jvp_of_moving, moved, same_varying, series_by_tracing
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.layers import Layer, PullBack, broadcast_to, gate_and_up, push_forward
from jax_tcgemm.sharding import partitioning, shardings
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching, mlir, xla

activated_tangent_p = core.Primitive("tcgemm_activated_tangent")
accumulating_tangent_p = core.Primitive("tcgemm_accumulating_tangent")


def activated_tangent(
    dz,
    z,
    rhs,
    dbias=None,
    *,
    dimension_numbers,
    activation,
    gate_up_axis=None,
    bias_axes=None,
    out_sharding=None,
    **params,
):
    """Bind tcgemm_activated_tangent; dimension_numbers are of the product of f(Z) and rhs."""
    ndim = z.ndim - (gate_up_axis is not None)
    vectors = () if dbias is None else (dbias,)
    return activated_tangent_p.bind(
        *same_varying(dz, z, rhs, *vectors),
        dimension_numbers=dimension_numbers,
        permutation=tuple(range(plain.result_ndim(ndim, rhs.ndim, dimension_numbers))),
        activation=activation,
        gate_up_axis=gate_up_axis,
        bias_axes=None if dbias is None else bias_axes,
        out_sharding=out_sharding,
        **params,
    )


def accumulating_tangent(drhs, lhs, buffer, *, dimension_numbers, out_sharding=None, **params):
    """Bind tcgemm_accumulating_tangent; `buffer` has the shape and dtype of `drhs`."""
    return accumulating_tangent_p.bind(
        *same_varying(drhs, lhs, buffer),
        dimension_numbers=dimension_numbers,
        permutation=tuple(range(plain.result_ndim(lhs.ndim, drhs.ndim, dimension_numbers))),
        out_sharding=out_sharding,
        **params,
    )


def activated_unfused(dz, z, rhs, *dbias, activation, gate_up_axis, bias_axes, **params):
    """Compute tcgemm_activated_tangent by a product without an epilogue."""
    wide = wide_dtype(dz.dtype)
    tangent = dz.astype(wide)
    for x in dbias:
        shape = [n if axis in bias_axes else 1 for axis, n in enumerate(dz.shape)]
        tangent = tangent + broadcast_to(x.astype(wide).reshape(shape), dz)
    both = (
        [x] if gate_up_axis is None else gate_and_up(x, gate_up_axis)
        for x in (z.astype(wide), tangent)
    )
    df = push_forward(activation, *both).astype(dz.dtype)
    return plain.dot_general(df, rhs, **params)


def accumulating_unfused(drhs, lhs, buffer, **params):
    """Compute tcgemm_accumulating_tangent by a product without an epilogue."""
    del buffer
    return plain.dot_general(lhs, drhs.astype(lhs.dtype), **params)


# --- typing, differentiation and lowering: those of the unfused ---------------------------------

# For `explain`, which shows their products.
UNFUSED = {}


def define_linear(p: core.Primitive, f, run=None) -> None:
    """Register the rules of a primitive that follow from a function that computes the same.

    These are its implementation, typing, JVP, lowering and jet. Batching and transposition are not.

    Args:
      p: the primitive.
      f: function of the same operands and parameters that returns an array. It is traced for
        typing and for derivatives.
      run: function to lower instead of `f`, or None.
    """
    UNFUSED[p] = f
    p.def_impl(functools.partial(xla.apply_primitive, p))
    p.def_effectful_abstract_eval(functools.partial(_abstract_eval, f))
    ad.primitive_jvps[p] = functools.partial(_jvp, f)
    mlir.register_lowering(p, mlir.lower_fun(run or f, multiple_results=False))
    jax_internals.check_nans(p)
    jax_internals.register_jet(p, functools.partial(series_by_tracing, f))


def _abstract_eval(f, *avals, **params):
    jaxpr = jax.make_jaxpr(functools.partial(f, **params))(*avals)
    (out,) = jaxpr.out_avals
    return out, jaxpr.effects


def _jvp(f, primals, tangents, **params):
    return jvp_of_moving(functools.partial(f, **params), primals, tangents)


define_linear(activated_tangent_p, activated_unfused)
define_linear(accumulating_tangent_p, accumulating_unfused)


# --- batching -----------------------------------------------------------------------------------


def _batch_activated(axis_data, args, dims, **params):
    """Batch dZ, Z and dbias together: if one is mapped, dZ and Z are broadcast."""
    dz, z, rhs, *dbias = args
    dz_dim, z_dim, rhs_dim, *bias_dim = dims
    lhs_ndim = (z.ndim - (z_dim is not None)) - (params["gate_up_axis"] is not None)
    lhs_dim = None
    if any(dim is not None for dim in (dz_dim, z_dim, *bias_dim)):
        lhs_dim, size = 0, axis_data.size
        dz, z = (moved(x, d, 0, size) for x, d in ((dz, dz_dim), (z, z_dim)))
        if params["gate_up_axis"] is not None:
            params["gate_up_axis"] += 1
        if dbias:
            bias_axes = tuple(axis + 1 for axis in params["bias_axes"])
            params["bias_axes"] = bias_axes if bias_dim[0] is None else (0, *bias_axes)
            dbias = [
                x if d is None else jnp.moveaxis(x, d, 0)
                for x, d in zip(dbias, bias_dim, strict=True)
            ]
    return _bind_batched(
        activated_tangent_p,
        axis_data,
        (dz, z, rhs, *dbias),
        (lhs_ndim, rhs.ndim - (rhs_dim is not None)),
        (lhs_dim, rhs_dim),
        **params,
    )


def _batch_accumulating(axis_data, args, dims, **params):
    drhs, lhs, buffer = args
    drhs_dim, lhs_dim, buffer_dim = dims
    rhs_ndim, rhs_dim = drhs.ndim - (drhs_dim is not None), None
    if drhs_dim is not None or buffer_dim is not None:
        rhs_dim = 0
        drhs = moved(drhs, drhs_dim, 0, axis_data.size)
        buffer = moved(buffer, buffer_dim, 0, axis_data.size)
    return _bind_batched(
        accumulating_tangent_p,
        axis_data,
        (drhs, lhs, buffer),
        (lhs.ndim - (lhs_dim is not None), rhs_ndim),
        (lhs_dim, rhs_dim),
        **params,
    )


def _bind_batched(
    primitive,
    axis_data,
    operands,
    ndims,
    dims,
    *,
    dimension_numbers,
    permutation,
    out_sharding,
    **params,
):
    position = None
    if dims != (None, None):
        ndims = [n + (dim is not None) for n, dim in zip(ndims, dims, strict=True)]
        dimension_numbers, permutation, position = plain.batched_numbers(
            ndims, dims, dimension_numbers, permutation
        )
        out_sharding = shardings.with_dimension(
            out_sharding, position, len(permutation), axis_data.explicit_mesh_axis
        )
    out = primitive.bind(
        *operands,
        dimension_numbers=dimension_numbers,
        permutation=permutation,
        out_sharding=out_sharding,
        **params,
    )
    return out, position


batching.fancy_primitive_batchers[activated_tangent_p] = _batch_activated
batching.fancy_primitive_batchers[accumulating_tangent_p] = _batch_accumulating


# --- transposition: where it is fused -----------------------------------------------------------


def _transpose_activated(
    g,
    dz,
    z,
    rhs,
    *dbias,
    options,
    dimension_numbers,
    permutation,
    precision,
    activation,
    gate_up_axis,
    bias_axes,
    **_,
):
    """The cotangent of Z, f'(Z) * (g rhs^T), and its sums for the bias."""
    if any(ad.is_undefined_primal(x) for x in (z, rhs)):
        raise NotImplementedError("tcgemm_activated_tangent is linear in dz and dbias only")
    if type(g) is ad.Zero:
        return [None] * (3 + len(dbias))
    numbers, order = plain.cotangent_numbers(
        z.ndim - (gate_up_axis is not None), rhs.ndim, dimension_numbers, permutation, is_rhs=False
    )
    sum_axes = None
    if dbias:  # Axes of the accumulator, which has no gate_up_axis.
        own = [axis for axis in range(z.ndim) if axis not in bias_axes and axis != gate_up_axis]
        sum_axes = tuple(axis - (gate_up_axis is not None and axis > gate_up_axis) for axis in own)
    out_sharding = shardings.of_cotangent(jax.typeof(z), without=gate_up_axis)
    how = {"permutation": order, "precision": precision, "out_sharding": out_sharding}
    layer = PullBack(np.dtype(z.dtype), activation, gate_up_axis, sum_axes)
    # Z is usually not needed any more: its cotangent, which has its size, takes its memory.
    encoding = Plain.of(g, rhs, numbers, **how)
    dz_bar, *sums = with_layer(encoding, (g, rhs), (z,), options, layer, in_place=0)
    bars = [dz_bar.astype(_aval(dz).dtype), None, None]
    if dbias:
        aval, total = _aval(dbias[0]), sums[0]
        if len(sums) == 2:
            # A bias without the gate_up_axis is shared by gate and up.
            total = (
                jnp.stack(sums, bias_axes.index(gate_up_axis))
                if gate_up_axis in bias_axes
                else sum(sums)
            )
        bars.append(partitioning.resharded(total.astype(aval.dtype), aval.sharding))
    undefined = [ad.is_undefined_primal(x) for x in (dz, z, rhs, *dbias)]
    return [bar if u else None for bar, u in zip(bars, undefined, strict=True)]


def _transpose_accumulating(
    g, drhs, lhs, buffer, *, options, dimension_numbers, permutation, precision, **_
):
    """Return the sum of the buffer and lhs^T g."""
    if type(g) is ad.Zero:
        return [buffer, None, None]
    numbers, order = plain.cotangent_numbers(
        drhs.aval.ndim, lhs.ndim, dimension_numbers, permutation, is_rhs=True
    )
    out_sharding = shardings.of_cotangent(drhs.aval)
    how = {"permutation": order, "precision": precision, "out_sharding": out_sharding}
    layer = Layer(np.dtype(drhs.aval.dtype), has_residual=True)
    encoding = Plain.of(lhs, g, numbers, **how)
    (bar,) = with_layer(encoding, (lhs, g), (buffer,), options, layer, in_place=0)
    return [bar, None, None]


def _aval(x):
    return x.aval if ad.is_undefined_primal(x) else jax.typeof(x)


ad.primitive_transposes[activated_tangent_p] = _transpose_activated
ad.primitive_transposes[accumulating_tangent_p] = _transpose_accumulating
