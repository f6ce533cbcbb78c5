"""The primitive `tcgemm_elementwise`: one, two or three arrays, permuted, mapped and combined.

    permute    D = alpha * op(A)
    binary     D = combine(alpha * opA(A), gamma * opC(C))
    trinary    D = combine(combine_ab(alpha * opA(A), beta * opB(B)), gamma * opC(C))

A mode that an operand lacks broadcasts it. A mapped dimension is one more mode. The derivative of a
permutation is a permutation; any other is that of the same operation in JAX's own terms.

Parameters, all static: options, modes (of each operand), result, unary, combine, scalars
(alpha, beta, gamma), compute (a name or "").
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm.device import tensor
from jax_tcgemm.device import tensor_reference as reference
from jax_tcgemm.primitives.rules import same_varying, type_of
from jax_tcgemm.primitives.tensor import lowering as tensor_lowering
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.tensor import modes as mode_names
from jax_tcgemm.problem.tensor.operation import Operation
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system.jax_internals import ad, batching, xla

elementwise_p = core.Primitive("tcgemm_elementwise")

_KINDS = {1: "permute", 2: "elementwise_binary", 3: "elementwise_trinary"}


def elementwise(*operands, options: CallOptions, modes, result, unary, combine, scalars, compute):
    """Binds the primitive; arguments are checked and canonical already."""
    return elementwise_p.bind(
        *same_varying(*operands),
        options=options,
        modes=tuple(modes),
        result=tuple(result),
        unary=tuple(unary),
        combine=tuple(combine),
        scalars=tuple(scalars),
        compute=compute,
    )


# --- typing -------------------------------------------------------------------------------------


def _reference(*operands, **params):
    return reference.elementwise(product_of(*operands, None, params).operation, operands)


elementwise_p.def_impl(functools.partial(xla.apply_primitive, elementwise_p))
elementwise_p.def_abstract_eval(type_of(_reference))


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, modes, result, **params):
    """A mapped dimension is a mode more; it comes first in the result, as in the last operand."""
    del axis_data
    if all(dim is None for dim in dims):
        return elementwise_p.bind(*args, modes=modes, result=result, **params), None
    new = 1 + max((mode for operand in modes for mode in operand), default=-1)
    # cuTENSOR takes a last operand that lies as the result alone.
    if len(args) > 1 and dims[-1] is not None:
        args, dims = [*args[:-1], jnp.moveaxis(args[-1], dims[-1], 0)], (*dims[:-1], 0)
    modes = tuple(
        operand if dim is None else (*operand[:dim], new, *operand[dim:])
        for operand, dim in zip(modes, dims, strict=True)
    )
    return elementwise(*args, modes=modes, result=(new, *result), **params), 0


batching.fancy_primitive_batchers[elementwise_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, **params):
    out = elementwise_p.bind(*primals, **params)
    if len(primals) == 1 and params["unary"] == ("identity",):
        return out, elementwise_p.bind(ad.instantiate_zeros(tangents[0]), **params)
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    _, tangent = jax.jvp(functools.partial(_reference, **params), primals, tangents)
    return out, tangent


def _transpose(ct, a, *, modes, result, **params):
    """Apply the inverse permutation to the cotangent."""
    if type(ct) is ad.Zero:
        return [ad.Zero(a.aval)]
    return [elementwise(ct, modes=(result,), result=modes[0], **params)]


ad.primitive_jvps[elementwise_p] = _jvp
ad.primitive_transposes[elementwise_p] = _transpose


# --- lowering -----------------------------------------------------------------------------------


def product_of(*types_and_params) -> tensor.Request:
    """Describe one call to its planner, from the types of operands and result, and params."""
    *operands, _, params = types_and_params
    operation = Operation(
        kind=_KINDS[len(operands)],
        dtype=np.dtype(operands[0].dtype),
        extents=mode_names.extents(params["modes"], [x.shape for x in operands]),
        operands=params["modes"],
        result=params["result"],
        unary=params["unary"],
        combine=params["combine"],
        scalars=params["scalars"],
        compute=params["compute"],
    )
    return tensor.Request(params["options"], operation)


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be sharded over devices: along every mode."""
    *_, params = avals_and_params
    return partitioning.Division(
        operands=tuple(tuple(f"mode{mode}" for mode in modes) for modes in params["modes"]),
        results=(tuple(f"mode{mode}" for mode in params["result"]),),
        call=lambda *operands: (elementwise(*operands, **params),),
    )


tensor_lowering.register(elementwise_p, product_of, division_of)
