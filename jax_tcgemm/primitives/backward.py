"""Linear primitives that stand in tangents, so that reverse mode is made of fused products.

    tcgemm_activated_tangent      out = dot_general(df, rhs), df the tangent of f(Z) for dZ + dbias
        its transpose is one product with a derivative as epilogue, dZ = f'(Z) * (g rhs^T), which
        also sums its columns for the bias
    tcgemm_accumulating_tangent   out = dot_general(lhs, drhs)
        its transpose adds to what a buffer holds, drhs = buffer + lhs^T g, in the buffer's dtype

Going forwards both are their unfused selves.

Parameters, all static: options, dimension_numbers, permutation, precision, preferred_element_type,
out_sharding; of the first also activation, pair (the dimension of Z that tells gate
and up apart, or None) and bias_axes (the dimensions of Z that dbias has, None where there is none).
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
    pair=None,
    bias_axes=None,
    out_sharding=None,
    **params,
):
    """Binds the first; the parameters of a plain product are those of f(Z) and rhs."""
    ndim = z.ndim - (pair is not None)
    vectors = () if dbias is None else (dbias,)
    return activated_tangent_p.bind(
        *same_varying(dz, z, rhs, *vectors),
        dimension_numbers=dimension_numbers,
        permutation=tuple(range(plain.result_ndim(ndim, rhs.ndim, dimension_numbers))),
        activation=activation,
        pair=pair,
        bias_axes=None if dbias is None else bias_axes,
        out_sharding=out_sharding,
        **params,
    )


def accumulating_tangent(drhs, lhs, buffer, *, dimension_numbers, out_sharding=None, **params):
    """Binds the second; `buffer` and `drhs` are alike."""
    return accumulating_tangent_p.bind(
        *same_varying(drhs, lhs, buffer),
        dimension_numbers=dimension_numbers,
        permutation=tuple(range(plain.result_ndim(lhs.ndim, drhs.ndim, dimension_numbers))),
        out_sharding=out_sharding,
        **params,
    )


def activated_unfused(dz, z, rhs, *dbias, activation, pair, bias_axes, **params):
    """The first by a plain product."""
    wide = wide_dtype(dz.dtype)
    tangent = dz.astype(wide)
    for x in dbias:
        shape = [n if axis in bias_axes else 1 for axis, n in enumerate(dz.shape)]
        tangent = tangent + broadcast_to(x.astype(wide).reshape(shape), dz)
    both = ([x] if pair is None else gate_and_up(x, pair) for x in (z.astype(wide), tangent))
    df = push_forward(activation, *both).astype(dz.dtype)
    return plain.dot_general(df, rhs, **params)


def accumulating_unfused(drhs, lhs, buffer, **params):
    """The second by a plain product."""
    del buffer
    return plain.dot_general(lhs, drhs.astype(lhs.dtype), **params)


# --- typing, differentiation and lowering: those of the unfused ---------------------------------

# For `explain`, which shows their products.
UNFUSED = {}


def define_linear(p: core.Primitive, f, run=None) -> None:
    """Gives a primitive the rules that follow from its being the same function as another.

    Args:
      p: the primitive; batching and transposition are still to be given.
      f: a function of the same operands and parameters, to an array, which types and
        differentiates it.
      run: what it is lowered to, where that is not `f`.
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
    """dZ, Z and the bias go together: what is mapped of one is mapped of all."""
    dz, z, rhs, *dbias = args
    dz_dim, z_dim, rhs_dim, *bias_dim = dims
    lhs_ndim = (z.ndim - (z_dim is not None)) - (params["pair"] is not None)
    lhs_dim = None
    if any(dim is not None for dim in (dz_dim, z_dim, *bias_dim)):
        lhs_dim, size = 0, axis_data.size
        dz, z = (moved(x, d, 0, size) for x, d in ((dz, dz_dim), (z, z_dim)))
        if params["pair"] is not None:
            params["pair"] += 1
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
    pair,
    bias_axes,
    **_,
):
    """The cotangent of Z, f'(Z) * (g rhs^T), and its sums for the bias."""
    if any(ad.is_undefined_primal(x) for x in (z, rhs)):
        raise NotImplementedError("tcgemm_activated_tangent is linear in dz and dbias only")
    if type(g) is ad.Zero:
        return [None] * (3 + len(dbias))
    numbers, order = plain.cotangent_numbers(
        z.ndim - (pair is not None), rhs.ndim, dimension_numbers, permutation, is_rhs=False
    )
    sum_axes = None
    if dbias:  # Of the accumulator, which lacks `pair`.
        own = [axis for axis in range(z.ndim) if axis not in bias_axes and axis != pair]
        sum_axes = tuple(axis - (pair is not None and axis > pair) for axis in own)
    out_sharding = shardings.of_cotangent(jax.typeof(z), without=pair)
    how = {"permutation": order, "precision": precision, "out_sharding": out_sharding}
    layer = PullBack(np.dtype(z.dtype), activation, pair, sum_axes)
    # Z is mostly of no more use: its cotangent, as large, needs no memory of its own.
    encoding = Plain.of(g, rhs, numbers, **how)
    found, *sums = with_layer(encoding, (g, rhs), (z,), options, layer, in_place=0)
    bars = [found.astype(_aval(dz).dtype), None, None]
    if dbias:
        aval, total = _aval(dbias[0]), sums[0]
        if len(sums) == 2:
            # Where the bias has no `pair` it is one for gate and up.
            total = jnp.stack(sums, bias_axes.index(pair)) if pair in bias_axes else sum(sums)
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
