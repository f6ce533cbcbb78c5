"""The primitive `tcgemm_fused_dot_general`: a dot_general with all that one call can do beside it.

    P = transpose(dot_general(lhs, rhs, dimension_numbers), permutation)
    D [, aux_out] [, sums of D] = what problem/fusion.py says of P and the optional operands

Operands are lhs, rhs and those of `fusion.OPTIONAL_OPERANDS` that `fusion.operands` names.
`unfused` is the same in JAX, made of `tcgemm_dot_general`: it types the primitive, differentiates
it where nothing is to be gained from fusing, and runs it where nothing takes it as one call.

Parameters, all static: those of `tcgemm_dot_general`, whose out_sharding is that of P, and fusion.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import dense, fused
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives import lowering
from jax_tcgemm.primitives.rules import (
    jvp_of_moving,
    moved,
    of_derivative,
    same_varying,
    series_by_parts,
    transpose_by_parts,
)
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.fusion import OPTIONAL_OPERANDS, Fusion, finish, push_forward
from jax_tcgemm.sharding import partitioning, shardings
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching, xla, zero_tangent

fused_dot_general_p = core.Primitive("tcgemm_fused_dot_general")
fused_dot_general_p.multiple_results = True


def fused_dot_general(
    lhs,
    rhs,
    *,
    options: CallOptions,
    dimension_numbers,
    fusion: Fusion,
    permutation=None,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    **given,
) -> list[jax.Array]:
    """Binds the primitive; arguments are checked and canonical already.

    `given` holds the optional operands by name; those that are None are left out.
    """
    jax_internals.register_imported()
    names = tuple(name for name in OPTIONAL_OPERANDS if given.get(name) is not None)
    if permutation is None:
        permutation = tuple(range(plain.result_ndim(lhs.ndim, rhs.ndim, dimension_numbers)))
    return fused_dot_general_p.bind(
        *same_varying(lhs, rhs, *(given[name] for name in names)),
        options=options,
        dimension_numbers=dimension_numbers,
        permutation=tuple(permutation),
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        fusion=dataclasses.replace(fusion, operands=names),
    )


def unfused(
    lhs, rhs, *optional, fusion: Fusion, preferred_element_type, as_written=False, **params
):
    """Compute the layer by plain products, and its epilogue by XLA.

    `as_written`: with the dtypes of the expression that users of plain JAX write, which XLA fuses
    best; otherwise in `wide_dtype` between the product and the result.
    """
    given = dict(zip(fusion.operands, optional, strict=True))
    dtype = _result_dtype(lhs, rhs, preferred_element_type)
    z_dtype = _dtype_as_written(fusion, given, dtype) if as_written else wide_dtype(dtype)
    z = _product(lhs, rhs, given.get("rhs_up"), fusion, preferred_element_type=z_dtype, **params)
    return finish(fusion, z, given, dtype)


def _dtype_as_written(fusion: Fusion, given, dtype):
    """The dtype of Z between XLA's product and its elementwise operations.

    That of the result: then XLA may add a bias and apply relu or gelu inside cuBLASLt's kernel.
    Wider where an addend is, or where a product of float16 could overflow before alpha.
    """
    addends = {x.dtype for name, x in given.items() if name != "rhs_up"}
    may_overflow = fusion.alpha != 1.0 and dtype == np.float16
    return wide_dtype(dtype) if may_overflow or addends - {np.dtype(dtype)} else dtype


def _result_dtype(lhs, rhs, preferred_element_type):
    if preferred_element_type is not None:
        return np.dtype(preferred_element_type)
    return jnp.promote_types(lhs.dtype, rhs.dtype)


def _product(lhs, rhs, rhs_up, fusion: Fusion, **params):
    """The product times alpha, with the dimension `pair` where there are two right operands."""
    z = plain.dot_general(lhs, rhs, **params)
    if rhs_up is not None:
        z = jnp.stack([z, plain.dot_general(lhs, rhs_up, **params)], fusion.pair)
    return z if fusion.alpha == 1.0 else fusion.alpha * z


# --- typing -------------------------------------------------------------------------------------


def _abstract_eval(*avals, **params):
    # What was asked for by name is found out when the primitive is lowered.
    unnamed = params | {"options": params["options"].selecting()}
    with lowering.named(params["options"].function), selection.unseen():
        jaxpr = jax.make_jaxpr(functools.partial(unfused, **unnamed))(*avals)
    lowering.expect(fused.make_plan, product_of, *avals, jaxpr.out_avals[0], params)
    return jaxpr.out_avals, set()


fused_dot_general_p.def_impl(functools.partial(xla.apply_primitive, fused_dot_general_p))
fused_dot_general_p.def_effectful_abstract_eval(_abstract_eval)


# --- batching -----------------------------------------------------------------------------------


def _batch(
    axis_data, args, dims, *, dimension_numbers, permutation, out_sharding, fusion, **params
):
    """As of a plain product; the optional operands follow its result."""
    if all(dim is None for dim in dims):
        out = fused_dot_general_p.bind(
            *args,
            dimension_numbers=dimension_numbers,
            permutation=permutation,
            out_sharding=out_sharding,
            fusion=fusion,
            **params,
        )
        return out, [None] * len(out)
    size = axis_data.size
    (lhs, rhs, *optional), (lhs_dim, rhs_dim, *optional_dims) = args, dims
    given = dict(zip(fusion.operands, zip(optional, optional_dims, strict=True), strict=True))
    if "rhs_up" in given and (rhs_dim is None) != (given["rhs_up"][1] is None):
        rhs, rhs_dim = moved(rhs, rhs_dim, 0, size), 0
    if lhs_dim is None and rhs_dim is None:
        lhs, lhs_dim = moved(lhs, None, 0, size), 0
    numbers, order, position = plain.batched_numbers(
        (lhs.ndim, rhs.ndim), (lhs_dim, rhs_dim), dimension_numbers, permutation
    )
    placed = _placed(fusion, position)
    operands = {}
    for name, (x, dim) in given.items():
        if name == "rhs_up":
            operands[name] = x if rhs_dim is None else moved(x, dim, rhs_dim, size)
        elif name == "bias":
            bias_axes = placed.bias_axes
            if dim is not None:
                bias_axes = tuple(sorted((*bias_axes, placed.z)))
                x = moved(x, dim, bias_axes.index(placed.z), size)
            operands[name] = x
            placed = dataclasses.replace(placed, bias_axes=bias_axes)
        else:
            operands[name] = moved(x, dim, placed.z if name == "aux_in" else placed.d, size)
    out = fused_dot_general(
        lhs,
        rhs,
        dimension_numbers=numbers,
        permutation=order,
        out_sharding=shardings.with_dimension(
            out_sharding, position, len(order), axis_data.explicit_mesh_axis
        ),
        fusion=dataclasses.replace(
            fusion, pair=placed.pair, bias_axes=placed.bias_axes, sum_axes=placed.sum_axes
        ),
        **operands,
        **params,
    )
    out_dims = [placed.d]
    if fusion.aux_out:
        out_dims.append(placed.z)
    if fusion.sum_axes is not None:
        out_dims.append(placed.d - sum(axis < placed.d for axis in placed.sum_axes))
    return out, out_dims


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A fusion whose product has one more dimension, which is `d` of D and `z` of Z or aux_in."""

    d: int
    z: int
    pair: int | None
    bias_axes: tuple[int, ...]
    sum_axes: tuple[int, ...] | None


def _placed(fusion: Fusion, position: int) -> _Placed:
    """Where a new dimension of P, at `position`, gets to."""
    pair = fusion.pair
    d = z = position
    if pair is not None:
        own = not fusion.derivative and "rhs_up" not in fusion.operands
        # P has the pair where it is packed, and never in front of the new dimension otherwise.
        after = position > pair
        if own:
            d = position - after
        else:
            z = position + after
            d = z if fusion.derivative else position
        pair += not after

    def bumped(axes, new):
        return tuple(axis + (axis >= new) for axis in axes)

    sum_axes = None if fusion.sum_axes is None else bumped(fusion.sum_axes, d)
    return _Placed(d, z, pair, bumped(fusion.bias_axes, z), sum_axes)


batching.fancy_primitive_batchers[fused_dot_general_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, *, fusion: Fusion, options, **params):
    """The tangent of D, f'(Z) * dZ + dresidual, for which Z is kept.

    The factors of dZ are plain products, so that reverse mode is made of products, too. Derivatives
    inherit the implementation, but not the config.
    """
    of_tangents = params | {"options": options.without_config()}
    names = ("lhs", "rhs", *fusion.operands)
    given = dict(zip(names, primals, strict=True))
    moving = {name: t for name, t in zip(names, tangents, strict=True) if type(t) is not ad.Zero}
    if fusion.derivative:
        f = functools.partial(unfused, fusion=fusion, **of_tangents)
        out = fused_dot_general_p.bind(*primals, fusion=fusion, options=options, **params)
        return out, jvp_of_moving(f, primals, tangents)[1]
    needs_z = moving.keys() - {"residual"} and not fusion.is_linear
    keeping = dataclasses.replace(fusion, aux_out=fusion.aux_out or bool(needs_z))
    out = fused_dot_general_p.bind(*primals, fusion=keeping, options=options, **params)
    dtype = out[0].dtype
    wide = wide_dtype(dtype)
    dz = _tangent_of_z(given, moving, fusion, dtype, **of_tangents)
    dd = None
    if dz is not None:
        z = out[1].astype(wide) if needs_z else None
        dd = dz if z is None else push_forward(fusion.activation, z, dz, fusion.pair)
    if "residual" in moving:
        dresidual = partitioning.resharded(moving["residual"], jax.typeof(out[0]).sharding)
        dresidual = dresidual.astype(wide)
        dd = dresidual if dd is None else dd + dresidual
    found = [dd]
    if fusion.aux_out:
        found.append(dz)
    if fusion.sum_axes is not None:
        found.append(None if dd is None else jnp.sum(dd, fusion.sum_axes))
    if needs_z and not fusion.aux_out:
        del out[1]
    return out, [
        zero_tangent(x)
        if t is None
        else partitioning.resharded(t.astype(x.dtype), jax.typeof(x).sharding)
        for x, t in zip(out, found, strict=True)
    ]


def _tangent_of_z(given, moving, fusion: Fusion, dtype, *, preferred_element_type, **params):
    """The tangent of Z in `wide_dtype`, None where nothing moves it."""
    del preferred_element_type
    wide, addends = wide_dtype(dtype), []

    def product(lhs, rhs, rhs_up):
        z = _product(lhs, rhs, rhs_up, fusion, preferred_element_type=dtype, **params)
        addends.append(z.astype(wide))

    if "lhs" in moving:
        product(moving["lhs"], given["rhs"], given.get("rhs_up"))
    if "rhs" in moving or "rhs_up" in moving:
        ups = [moving.get(name) for name in ("rhs", "rhs_up")]
        zeros = [jnp.zeros_like(given["rhs"]) if t is None else t for t in ups]
        product(given["lhs"], zeros[0], zeros[1] if "rhs_up" in given else None)
    if "bias" in moving:
        _, shape = fused.shapes(_product_shape(given, params), fusion)
        bias = moving["bias"].astype(wide)
        addends.append(lax.broadcast_in_dim(bias, shape, fusion.bias_axes))
    return functools.reduce(lax.add, addends) if addends else None


def _product_shape(given, params):
    keys = ("options", "dimension_numbers", "permutation", "out_sharding")
    shared = {key: params[key] for key in keys}
    return plain.result_type(given["lhs"], given["rhs"], **shared).shape


def _transpose(cotangents, *operands, **params):
    """Of a call that is linear in some operands: that of the unfused one."""
    return transpose_by_parts(unfused, cotangents, operands, **of_derivative(params))


ad.primitive_jvps[fused_dot_general_p] = _jvp
ad.primitive_transposes[fused_dot_general_p] = _transpose


def _series(primals, series, **params):
    return series_by_parts(unfused, primals, series, **of_derivative(params))


jax_internals.register_jet(fused_dot_general_p, _series)


# --- other interpreters of JAX ------------------------------------------------------------------


def _flops(lhs, rhs, *_, fusion, **params) -> int:
    """Those of the products."""
    return plain.flops(lhs, rhs, **params) * (1 + ("rhs_up" in fusion.operands))


jax_internals.register_roofline(fused_dot_general_p, _flops)


# --- lowering -----------------------------------------------------------------------------------


def product_of(lhs, rhs, *rest) -> fused.Product:
    """What one call of the primitive says, from the types of its operands and D, and its params."""
    *optional, out, params = rest
    shape = _product_shape({"lhs": lhs, "rhs": rhs}, params)
    product = plain.product_of(lhs, rhs, jax.ShapeDtypeStruct(shape, out.dtype), params)
    operands = tuple((tuple(x.shape), np.dtype(x.dtype)) for x in optional)
    return fused.Product(product, params["fusion"], operands)


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be divided over devices: as the plain product, the pair of a gate left whole.

    Where a contracted dimension is divided, what happens after the product waits for the sum.
    """
    lhs, rhs, params = *avals_and_params[:2], avals_and_params[-1] | {"out_sharding": None}
    fusion = params["fusion"]
    shared = {key: value for key, value in params.items() if key != "fusion"}
    product = plain.division_of(lhs, rhs, shared)
    (z_names,), pair = product.results, "pair"
    if "rhs_up" in fusion.operands:
        z_names = (*z_names[: fusion.pair], pair, *z_names[fusion.pair :])
    elif fusion.pair is not None and not fusion.derivative:
        pair = z_names[fusion.pair]
    d_names = tuple(name for name in z_names if name != pair)
    if fusion.derivative and fusion.pair is not None:
        d_names = (*z_names[: fusion.pair], pair, *z_names[fusion.pair :])
    names = {
        "rhs_up": product.operands[1],
        "bias": tuple(z_names[axis] for axis in fusion.bias_axes),
        "aux_in": d_names,
        "residual": d_names,
    }
    results = [d_names]
    if fusion.aux_out:
        results.append(z_names)
    if fusion.sum_axes is not None:
        results.append(tuple(n for i, n in enumerate(d_names) if i not in fusion.sum_axes))
    dtype = _result_dtype(lhs, rhs, params["preferred_element_type"])
    after = [i for i, name in enumerate(fusion.operands) if name != "rhs_up"]

    def multiply(lhs, rhs, rhs_up=None):
        return (_product(lhs, rhs, rhs_up, fusion, **shared | {"preferred_element_type": dtype}),)

    def finish_sum(sums, *others):
        given = dict(zip((fusion.operands[i] for i in after), others, strict=True))
        return tuple(finish(fusion, sums[0].astype(wide_dtype(dtype)), given, dtype))

    return partitioning.Division(
        operands=(*product.operands, *(names[name] for name in fusion.operands)),
        results=tuple(results),
        call=lambda *operands: tuple(fused_dot_general_p.bind(*operands, **params)),
        product=multiply,
        addends=(z_names,),
        finish=finish_sum,
        epilogue=tuple(2 + i for i in after),
        whole=() if fusion.pair is None else (pair,),
    )


def _lower(ctx, *operands, device, obstacle, **params):
    product = product_of(*ctx.avals_in, ctx.avals_out[0], params)
    is_covered = dense.is_covered(product.product, device.platform)
    if not obstacle and partitioning.is_divided(ctx) and is_covered:
        return partitioning.lower(ctx, operands, division_of(*ctx.avals_in, params))
    plan = fused.make_plan(product, device, obstacle)
    if not plan.is_fused:
        unfused_call = functools.partial(unfused, as_written=device.platform == "cuda", **params)
        return partitioning.lower_on_device(ctx, unfused_call, *operands)

    def on_device(lhs, rhs, *optional):
        given = dict(zip(params["fusion"].operands, optional, strict=True))
        return fused.fused_dot_general(plan, lhs, rhs, given)

    return partitioning.lower_on_device(ctx, on_device, *operands)


def num_rhs(params) -> int:
    """The number of right operands of a call."""
    return 1 + ("rhs_up" in params["fusion"].operands)


lowering.register(fused_dot_general_p, _lower, num_rhs)
