"""The primitive `tcgemm_reduce`: alpha * reduction of op(A) over modes, plus beta * C.

C, which has the result's modes, is optional. A mapped dimension is one more mode of all. A sum is
linear and its gradient a broadcast; the derivative of any other reduction is that of the same one
in JAX's own terms.

Parameters, all static: options, modes (of a), result, unary (of a), combine (add, mul,
max or min), alpha, beta, compute (a name or "").
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm.device import tensor
from jax_tcgemm.device import tensor_reference as reference
from jax_tcgemm.primitives.rules import moved, same_varying, type_of
from jax_tcgemm.primitives.tensor import lowering as tensor_lowering
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.tensor import modes as mode_names
from jax_tcgemm.problem.tensor.operation import Operation
from jax_tcgemm.problem.tensor.operators import scaled
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system.jax_internals import ad, batching, xla

reduce_p = core.Primitive("tcgemm_reduce")


def reduce(*operands, options: CallOptions, modes, result, unary, combine, alpha, beta, compute):
    """Binds the primitive; arguments are checked and canonical already."""
    return reduce_p.bind(
        *same_varying(*operands),
        options=options,
        modes=tuple(modes),
        result=tuple(result),
        unary=unary,
        combine=combine,
        alpha=alpha,
        beta=beta,
        compute=compute,
    )


# --- typing -------------------------------------------------------------------------------------


def _reference(*operands, **params):
    return reference.reduce(product_of(*operands, None, params).operation, operands)


reduce_p.def_impl(functools.partial(xla.apply_primitive, reduce_p))
reduce_p.def_abstract_eval(type_of(_reference))


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, modes, result, **params):
    """A mapped dimension is a mode more; it comes first in the result."""
    a, *c = args
    if all(dim is None for dim in dims):
        return reduce_p.bind(*args, modes=modes, result=result, **params), None
    if dims[0] is None:
        out = reduce_p.bind(a, modes=modes, result=result, **params | {"beta": 0})
        return out + scaled(jnp.moveaxis(c[0], dims[1], 0), params["beta"]), 0
    new = 1 + max(modes, default=-1)
    modes = (*modes[: dims[0]], new, *modes[dims[0] :])
    if c:
        c = [moved(c[0], dims[1], 0, axis_data.size)]
    return reduce(a, *c, modes=modes, result=(new, *result), **params), 0


batching.fancy_primitive_batchers[reduce_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _is_linear(params) -> bool:
    return params["combine"] == "add" and params["unary"] == "identity"


def _jvp(primals, tangents, **params):
    out = reduce_p.bind(*primals, **params)
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    if _is_linear(params):
        tangent = reduce_p.bind(*same_varying(*tangents), **params)
    else:
        _, tangent = jax.jvp(functools.partial(_reference, **params), primals, tangents)
    return out, partitioning.resharded(tangent, jax.typeof(out).sharding)


def _transpose(ct, a, *c, modes, result, alpha, beta, **params):
    """Repeat alpha times the cotangent along the reduced modes."""
    del params
    cotangents = []
    for x, scalar, own in zip((a, *c), (alpha, beta), (modes, result), strict=False):
        if not ad.is_undefined_primal(x):
            cotangents.append(None)
        elif type(ct) is ad.Zero:
            cotangents.append(ad.Zero(x.aval))
        else:
            dimensions = tuple(own.index(mode) for mode in result)
            bar = lax.transpose(scaled(ct, scalar), np.argsort(dimensions))
            bar = lax.broadcast_in_dim(bar, x.aval.shape, tuple(sorted(dimensions)))
            cotangents.append(partitioning.resharded(bar, x.aval.sharding))
    return cotangents


ad.primitive_jvps[reduce_p] = _jvp
ad.primitive_transposes[reduce_p] = _transpose


# --- lowering -----------------------------------------------------------------------------------


def product_of(*types_and_params) -> tensor.Request:
    """Describe one call to its planner, from the types of operands and result, and params."""
    *operands, _, params = types_and_params
    has_c = len(operands) == 2
    operation = Operation(
        kind="reduce",
        dtype=np.dtype(operands[0].dtype),
        extents=mode_names.extents((params["modes"],), [operands[0].shape]),
        operands=(params["modes"], *([params["result"]] if has_c else [])),
        result=params["result"],
        unary=(params["unary"], *(["identity"] if has_c else [])),
        combine=(params["combine"],),
        scalars=(params["alpha"], params["beta"], 1),
        compute=params["compute"],
    )
    return tensor.Request(params["options"], operation)


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be sharded over devices: along the modes that stay, and of a sum along all."""
    *operands, params = avals_and_params
    modes = tuple(f"mode{mode}" for mode in params["modes"])
    result = tuple(f"mode{mode}" for mode in params["result"])
    has_c = len(operands) == 2

    def finish(sums, *c):
        return tuple(x + scaled(c[0], params["beta"]) for x in sums) if c else sums

    return partitioning.Division(
        operands=(modes, *([result] if has_c else [])),
        results=(result,),
        call=lambda *operands: (reduce(*operands, **params),),
        product=lambda a: (reduce(a, **params | {"beta": 0}),),
        finish=finish,
        epilogue=(1,) if has_c else (),
        whole=() if params["combine"] == "add" else tuple(set(modes) - set(result)),
    )


tensor_lowering.register(reduce_p, product_of, division_of)
