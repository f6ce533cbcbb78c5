"""The primitive `tcgemm_contract`: alpha * opA(A) * opB(B), summed over modes, plus beta * C.

The operators are identity or conj: other functions of an operand are applied before. C, which has
the result's modes, is optional. The primitive is closed under differentiation and batching: the
gradient of an operand comes out in that operand's own order of modes, and a mapped dimension is
one more mode.

Parameters, all static: options, modes (of a and b), result, conj (of a and b), alpha,
beta, compute (a name or ""), precision (canonical), result_dtype, out_sharding (of the product),
algorithm.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core.primitives import dot_general_p, transpose_p

from jax_tcgemm.device import tensor
from jax_tcgemm.primitives import lowering
from jax_tcgemm.primitives.rules import bilinear_series, moved, same_varying
from jax_tcgemm.primitives.tensor import lowering as tensor_lowering
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.tensor import modes as mode_names
from jax_tcgemm.problem.tensor.operation import Operation, dot_dimensions
from jax_tcgemm.problem.tensor.operators import scaled
from jax_tcgemm.sharding import partitioning, shardings
from jax_tcgemm.system.jax_internals import ad, batching, register_jet, xla, zero_tangent

contract_p = core.Primitive("tcgemm_contract")


def contract(
    *operands,
    options: CallOptions,
    modes,
    result,
    conj=(False, False),
    alpha=1,
    beta=0,
    compute="",
    precision=None,
    result_dtype=None,
    out_sharding=None,
    algorithm="default",
):
    """Binds the primitive; arguments are checked and canonical already."""
    return contract_p.bind(
        *same_varying(*operands),
        options=options,
        modes=tuple(modes),
        result=tuple(result),
        conj=tuple(conj),
        alpha=alpha,
        beta=beta,
        compute=compute,
        precision=precision,
        result_dtype=np.dtype(operands[0].dtype if result_dtype is None else result_dtype),
        out_sharding=out_sharding,
        algorithm=algorithm,
    )


# --- typing -------------------------------------------------------------------------------------


def _abstract_eval(*avals, **params):
    numbers, permutation = dot_dimensions(*params["modes"], params["result"])
    with lowering.named(params["options"].function):
        out, _ = dot_general_p.abstract_eval(
            *avals[:2],
            dimension_numbers=numbers,
            precision=None,
            preferred_element_type=params["result_dtype"],
            out_sharding=shardings.natural(params["out_sharding"], permutation),
        )
    out, _ = transpose_p.abstract_eval(out, permutation=permutation)
    return out


contract_p.def_impl(functools.partial(xla.apply_primitive, contract_p))
contract_p.def_abstract_eval(_abstract_eval)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, modes, result, out_sharding, **params):
    """A mapped dimension is a mode more, of whichever operands have it; nothing moves."""
    a, b, *c = args
    c_dim = dims[2] if c else None
    if dims[0] is None and dims[1] is None:
        params |= {"modes": modes, "result": result, "out_sharding": out_sharding}
        if c_dim is None:
            return contract_p.bind(*args, **params), None
        out = contract_p.bind(a, b, **params | {"beta": 0})
        c = jnp.moveaxis(c[0], c_dim, 0)
        return out + scaled(c, params["beta"]), 0
    new = 1 + max((mode for operand in modes for mode in operand), default=-1)
    modes = tuple(
        operand if dim is None else (*operand[:dim], new, *operand[dim:])
        for operand, dim in zip(modes, dims[:2], strict=True)
    )
    # Next to its neighbor in memory, where both may fold into one extent; in front otherwise. A
    # mode of both operands, which is of the batch, folds with no mode of one operand.
    candidates = set(result)
    if dims[0] is not None and dims[1] is not None:
        candidates &= {*modes[0]} & {*modes[1]}
    operand, dim = next((m, d) for m, d in zip(modes, dims[:2], strict=True) if d is not None)
    after, before = operand[dim + 1 : dim + 2], operand[max(dim - 1, 0) : dim]
    if after and after[0] in candidates:
        position = result.index(after[0])
    elif before and before[0] in candidates:
        position = result.index(before[0]) + 1
    else:
        position = 0
    result = (*result[:position], new, *result[position:])
    if c:
        c = [moved(c[0], c_dim, position, axis_data.size)]
    out_sharding = shardings.with_dimension(
        out_sharding, position, len(result), axis_data.explicit_mesh_axis
    )
    params |= {"modes": modes, "result": result, "out_sharding": out_sharding}
    return contract(a, b, *c, **params), position


batching.fancy_primitive_batchers[contract_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, **params):
    """Linear in A, in B and in C: each tangent is added to the next product as its C."""
    a, b, *c = primals
    out = contract_p.bind(*primals, **params)
    total = None
    if c and type(tangents[2]) is not ad.Zero:
        total = scaled(tangents[2], params["beta"])
    for tangent, operands in ((tangents[0], lambda t: (t, b)), (tangents[1], lambda t: (a, t))):
        if type(tangent) is not ad.Zero:
            addend, beta = ((total,), 1) if total is not None else ((), 0)
            total = contract(*operands(tangent), *addend, **params | {"beta": beta})
    if total is None:
        return out, zero_tangent(out)
    return out, partitioning.resharded(total, jax.typeof(out).sharding)


def _transpose(ct, a, b, *c, modes, result, conj, alpha, beta, **params):
    """The cotangent of A or of B, in its own order of modes, and of C: beta * ct.

    With opA = conj: A = conj(alpha ct opB(B)) = conj(alpha) conj(ct) conj(opB(B)).
    """
    cotangents = [None, None] + [None] * len(c)
    if c and ad.is_undefined_primal(c[0]):
        cotangents[2] = ct
        if type(ct) is not ad.Zero:
            own = scaled(ct, beta).astype(c[0].aval.dtype)
            cotangents[2] = partitioning.resharded(own, c[0].aval.sharding)
    for i, (x, other) in enumerate(((a, b), (b, a))):
        if not ad.is_undefined_primal(x):
            continue
        if type(ct) is ad.Zero:
            cotangents[i] = ad.Zero(x.aval)
            continue
        flipped = conj[i]
        missing = [mode for mode in modes[i] if mode not in result and mode not in modes[1 - i]]
        assert not missing, "every mode of an operand is in the result or in the other operand"
        params["result_dtype"] = np.dtype(x.aval.dtype)
        params["out_sharding"] = shardings.of_cotangent(x.aval)
        # The result, and with it its cotangent, may be wider than the operands.
        dtype = jnp.promote_types(ct.dtype, other.dtype)
        cotangents[i] = contract(
            ct.astype(dtype),
            other.astype(dtype),
            modes=(result, modes[1 - i]),
            result=modes[i],
            conj=(flipped, flipped != conj[1 - i]),
            alpha=complex(alpha).conjugate() if flipped else alpha,
            **params,
        )
    return cotangents


ad.primitive_jvps[contract_p] = _jvp
ad.primitive_transposes[contract_p] = _transpose


def _series(primals, series, **params):
    """Bilinear in A and B, and beta * C beside it."""
    value, terms = bilinear_series(contract_p, primals[:2], series[:2], **params | {"beta": 0})
    if len(primals) == 3:
        c = [scaled(x, params["beta"]) for x in (primals[2], *series[2])]
        value, *terms = map(lax.add, (value, *terms), c)
    return value, terms


register_jet(contract_p, _series)


# --- lowering -----------------------------------------------------------------------------------


def product_of(*types_and_params) -> tensor.Request:
    """Describe one call to its planner, from the types of operands and result, and params."""
    *operands, _, params = types_and_params
    unary = tuple("conj" if conj else "identity" for conj in params["conj"])
    has_c = len(operands) == 3
    operation = Operation(
        kind="contract",
        dtype=np.dtype(operands[0].dtype),
        extents=mode_names.extents(params["modes"], [x.shape for x in operands[:2]]),
        operands=params["modes"] + ((params["result"],) if has_c else ()),
        result=params["result"],
        unary=unary + (("identity",) if has_c else ()),
        scalars=(params["alpha"], params["beta"], 1),
        compute=params["compute"],
        algorithm=params["algorithm"],
    )
    return tensor.Request(
        params["options"],
        operation,
        params["precision"],
        params["result_dtype"],
        params["out_sharding"],
    )


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be sharded over devices: along every mode. C is added after the sum."""
    *operands, params = avals_and_params
    params = params | {"out_sharding": None}
    result = tuple(f"mode{mode}" for mode in params["result"])
    has_c = len(operands) == 3

    def finish(sums, *c):
        return tuple(x + scaled(c[0], params["beta"]) for x in sums) if c else sums

    return partitioning.Division(
        operands=(
            *(tuple(f"mode{mode}" for mode in modes) for modes in params["modes"]),
            *([result] if has_c else []),
        ),
        results=(result,),
        call=lambda *operands: (contract(*operands, **params),),
        product=lambda a, b: (contract(a, b, **params | {"beta": 0}),),
        finish=finish,
        epilogue=(2,) if has_c else (),
    )


# A contraction of an array with itself may be symmetric.
tensor_lowering.register(contract_p, product_of, division_of, cacheable=False)
