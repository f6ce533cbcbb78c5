"""Predicates of equations: which can be fused into an epilogue, and which are loops of XLA."""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm.epilogues.calls import called, closes_over_arrays
from jax_tcgemm.epilogues.code.expressions import EXPRESSIONS, STORED
from jax_tcgemm.epilogues.code.primitives import EXPANSIONS
from jax_tcgemm.epilogues.code.reader import ELEMENTWISE
from jax_tcgemm.epilogues.gate_up import splits_gate_up
from jax_tcgemm.system.jax_internals import as_jaxpr, has_plain_context

# Primitives whose result has the elements of their operand, unchanged.
_SAME = frozenset({"copy", "copy_p", "stop_gradient", "pvary", "pcast", "name"})
_ELEMENTWISE = frozenset(EXPRESSIONS.keys() | EXPANSIONS.keys() | _SAME) - {"threefry2x32"}
# XLA computes the operands in the loop that writes the result. Calls write both operands of a
# `Concatenation`.
CONCATENATIONS = frozenset({"concatenate", "pad", "stack"})
# Calls with custom derivatives, which are not inlined; calls of `jax.jit` are inlined before.
_CALLS = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
_REDUCED = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_REDUCTIONS = frozenset(
    {f"reduce_{kind}" for kind in ("sum", "max", "min", "prod", "and", "or")} | {"argmax", "argmin"}
)


def is_elementwise(eqn: core.JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Return whether results of a shape depend elementwise on the operands."""
    if eqn.effects or not has_plain_context(eqn):
        return False
    if not all(_is_stored(x.aval) and x.aval.shape == shape for x in eqn.outvars):
        return False
    if not all(_is_stored(x.aval) and _broadcasts(x.aval.shape, shape) for x in eqn.invars):
        return False
    if is_call(eqn):
        inner = called(eqn)
        return inner is not None and _is_of_elements(inner, shape)
    return eqn.primitive.name in _ELEMENTWISE


def is_repeated(eqn: core.JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Return whether an equation broadcasts an array to a shape; kernels read the array itself."""
    if eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) != 1:
        return False
    (x,), (out,) = eqn.invars, eqn.outvars
    return out.aval.shape == shape and _is_stored(x.aval) and has_plain_context(eqn)


def is_call(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation calls a function with a custom derivative."""
    return eqn.primitive.name in _CALLS


def is_reduction(eqn: core.JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Return whether an equation is a sum, maximum or minimum of floats of a shape."""
    if eqn.primitive.name not in _REDUCED or eqn.effects or not has_plain_context(eqn):
        return False
    (x,) = eqn.invars
    is_float = _is_stored(x.aval) and jnp.issubdtype(x.aval.dtype, np.floating)
    return is_float and x.aval.shape == shape and eqn.params.get("out_sharding") is None


def is_fusable(eqn: core.JaxprEqn) -> bool:
    """Return whether XLA computes an equation in a loop, into which it can fuse the operands."""
    name = eqn.primitive.name
    if eqn.effects:
        return False
    if name in ("jit", "pjit", *_CALLS):
        inner = called(eqn)
        return inner is not None and _is_fusable(as_jaxpr(inner))
    return name in _ELEMENTWISE or name in _REDUCTIONS or name in CONCATENATIONS


def is_call_of_elements(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is a `jax.jit` call of elementwise equations, to be inlined.

    The function may also split operands into gate and up, and concatenate.
    """
    return is_written_call(eqn) and _is_of_some_elements(as_jaxpr(called(eqn)))


def is_written_call(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is a `jax.jit` call that may be inlined."""
    if eqn.primitive.name not in ("jit", "pjit") or eqn.effects or closes_over_arrays(eqn):
        return False
    params = eqn.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return (
        not any(params.get("donated_invars", ()))
        and all(type(x).__name__ == "UnspecifiedValue" for x in shardings)
        and not any(params.get("in_layouts", ()) + params.get("out_layouts", ()))
        and not params.get("compiler_options_kvs", ())
        and has_plain_context(eqn)
        and bool(eqn.outvars)
    )


def rule_against(eqn: core.JaxprEqn, shape: tuple[int, ...]) -> str:
    """Return the rule that an equation breaks which is not elementwise for a shape."""
    if eqn.effects:
        return "have no effects to be part of a kernel"
    if eqn.primitive.name in _ELEMENTWISE and any(x.aval.shape != shape for x in eqn.outvars):
        return f"be of the product's shape, {shape}, to be part of its kernel"
    return ELEMENTWISE


@functools.lru_cache(maxsize=4096)
def _is_of_elements(inner, shape) -> bool:
    """Return whether a function's equations are elementwise for a shape, or compute scalars."""
    if getattr(inner, "consts", ()) or as_jaxpr(inner).constvars:
        return False
    return all(_is_inner(eqn, shape) for eqn in as_jaxpr(inner).eqns)


def _is_inner(eqn: core.JaxprEqn, shape) -> bool:
    if all(x.aval.shape == () for x in (*eqn.invars, *eqn.outvars)):
        shape = ()
    if eqn.primitive.name in ("jit", "pjit"):
        return not eqn.effects and _is_of_elements(called(eqn), shape)
    return is_elementwise(eqn, shape) or is_repeated(eqn, shape)


@functools.lru_cache(maxsize=4096)
def _is_of_some_elements(jaxpr: core.Jaxpr) -> bool:
    shapes = {x.aval.shape for x in jaxpr.outvars}
    shape = max(shapes, key=math.prod, default=())
    moving = [eqn for eqn in jaxpr.eqns if _splits_or_concatenates(eqn)]
    for eqn in moving:
        shapes.update(x.aval.shape for x in (*eqn.invars, *eqn.outvars))
    if not moving and not shapes.issubset({shape, ()}):
        return False
    rest = [eqn for eqn in jaxpr.eqns if not _splits_or_concatenates(eqn)]
    return all(any(_is_inner(eqn, shape) for shape in shapes) for eqn in rest)


def _splits_or_concatenates(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation splits gate and up, or concatenates."""
    return not eqn.effects and (
        splits_gate_up(eqn) or eqn.primitive.name in ("concatenate", "stack")
    )


@functools.lru_cache(maxsize=4096)
def _is_fusable(jaxpr: core.Jaxpr) -> bool:
    return all(is_fusable(eqn) or eqn.primitive.name in _MOVES for eqn in jaxpr.eqns)


# Fusable inside calls only: between two products, they may be an operand of the second.
_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "iota"})


def _broadcasts(operand_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a shape broadcasts to another: a scalar, or of equal rank with sizes of 1."""
    is_scalar = operand_shape == ()
    return is_scalar or (
        len(operand_shape) == len(shape)
        and all(x in (1, y) for x, y in zip(operand_shape, shape, strict=True))
    )


def _is_stored(aval) -> bool:
    return getattr(aval, "dtype", None) in STORED
