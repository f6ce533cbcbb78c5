"""The epilogue function of a group of equations, from accumulators and inputs to results.

Groups with the same structure share one function object, so that planning, code generation and
compilation happen once.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm.epilogues.code.expressions import EXPRESSIONS, is_narrow
from jax_tcgemm.epilogues.code.primitives import EXPANSIONS
from jax_tcgemm.epilogues.gate_up import GateUp
from jax_tcgemm.epilogues.group import Group
from jax_tcgemm.system.jax_internals import (
    as_jaxpr,
    bound,
    function_of,
    like,
    new_variable,
    with_context_of,
)

_MOST_CACHED = 4096
_cache: collections.OrderedDict = collections.OrderedDict()
_lock = threading.Lock()


def group_function(
    equations: Sequence[core.JaxprEqn], group: Group, accumulator: np.dtype, *, wide: bool = False
) -> tuple[core.ClosedJaxpr, int]:
    """Return the epilogue function of a group, from a cache if a group had the same structure.

    Args:
      equations: the program.
      group: the group.
      accumulator: the dtype of the products' accumulators.
      wide: whether to leave out roundings to narrower dtypes between accumulators and results.

    Returns:
      The function of the accumulators and the inputs, and the number of roundings left out.
    """
    source = _GroupEquations.of(equations, group)
    key = source.structure, np.dtype(accumulator), wide
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    function = source.function(np.dtype(accumulator)), 0
    if wide:
        # Functions that cannot be traced outside their program keep their roundings.
        with contextlib.suppress(Exception):
            function = _without_roundings(function[0])
    with _lock:
        function = _cache.setdefault(key, function)
        if len(_cache) > _MOST_CACHED:
            _cache.popitem(last=False)
    return function


@dataclasses.dataclass(frozen=True)
class _GroupEquations:
    """Equations and variables of a group's function.

    Attributes:
      calls: equations of the products.
      gate_up: None, or how one stacked product is split into gate and up.
      before_split: equations between the stacked product and its split.
      equations: the other equations.
      inputs: variables that the equations read besides the products.
      results: variables to return, which may include products.
    """

    calls: Sequence[core.JaxprEqn]
    gate_up: GateUp | None
    before_split: Sequence[core.JaxprEqn]
    equations: Sequence[core.JaxprEqn]
    inputs: Sequence[core.Var]
    results: Sequence[core.Var]

    @classmethod
    def of(cls, equations: Sequence[core.JaxprEqn], group: Group) -> "_GroupEquations":
        """Return the equations and variables of a program's group."""
        gate_up = group.gate_up
        before_split = (*group.before, *(gate_up.chain if gate_up else ()))
        numbers = group.products, before_split, group.members
        calls, before_split, rest = ([equations[i] for i in own] for own in numbers)
        return cls(calls, gate_up, before_split, rest, group.inputs, group.results)

    @property
    def structure(self) -> tuple:
        """Key that is equal for groups with the same function."""
        products, gate_up = tuple(eqn.outvars[0] for eqn in self.calls), self.gate_up
        if gate_up is None:
            return _structure(self.equations, (*products, *self.inputs), self.results)
        arguments = *products, *gate_up.outputs, *self.inputs
        split = _split_variable(self.before_split, gate_up)
        before = _structure(self.before_split, arguments, (split,))
        rest = _structure(self.equations, arguments, self.results)
        return before, rest, gate_up.dimension, gate_up.is_dropped, gate_up.is_interleaved

    def function(self, accumulator: np.dtype) -> core.ClosedJaxpr:
        """Return the function of accumulators of a dtype."""
        products = [eqn.outvars[0] for eqn in self.calls]
        if self.gate_up is None:
            accs, conversions = _converted(self.calls, products, accumulator)
            arguments = *accs, *self.inputs
            return function_of(arguments, (*conversions, *self.equations), self.results)
        accs, conversions = _converted(self.calls * 2, self.gate_up.outputs, accumulator)
        if not self.before_split:
            arguments = *accs, *self.inputs
            return function_of(arguments, (*conversions, *self.equations), self.results)
        return self._function_of_gate_up(accumulator)

    def _function_of_gate_up(self, accumulator: np.dtype) -> core.ClosedJaxpr:
        """Return the function that applies equations before the split to gate and up separately."""
        gate_up, (product,) = self.gate_up, (eqn.outvars[0] for eqn in self.calls)
        dependent = _computed_from(product, self.before_split)

        def run(*arguments):
            env = dict(zip(self.inputs, arguments[2:], strict=True))
            _run([eqn for eqn in self.before_split if eqn not in dependent], env)
            for half, output in enumerate(gate_up.outputs):
                acc = lax.convert_element_type(arguments[half], product.aval.dtype)
                if gate_up.is_dropped:
                    acc = lax.expand_dims(acc, (gate_up.dimension,))
                values = {x: _gate_or_up(y, half, gate_up) for x, y in env.items()}
                values[product] = acc
                _run(dependent, values)
                result = values[_split_variable(self.before_split, gate_up)]
                if gate_up.is_dropped:
                    result = lax.squeeze(result, (gate_up.dimension,))
                env[output] = result
            _run(self.equations, env)
            return [_value(x, env) for x in self.results]

        accs, _ = _converted(self.calls * 2, gate_up.outputs, accumulator)
        return jax.make_jaxpr(run)(*(x.aval for x in (*accs, *self.inputs)))


def _converted(calls, products, accumulator: np.dtype) -> tuple[list, list[core.JaxprEqn]]:
    """Return variables for the accumulators, and equations that round them to the products."""
    if products[0].aval.dtype == accumulator:
        return list(products), []
    accs, conversions = [], []
    for call, product in zip(calls, products, strict=True):
        aval = product.aval
        acc = new_variable(product, like(aval, aval.shape, accumulator, aval.sharding))
        eqn = with_context_of(_conversion(accumulator, aval.dtype), call)
        conversions.append(
            eqn.replace(invars=[acc], outvars=[product], source_info=call.source_info)
        )
        accs.append(acc)
    return accs, conversions


def _split_variable(before_split: Sequence[core.JaxprEqn], gate_up: GateUp) -> core.Var:
    """Return the variable that is split into gate and up."""
    return before_split[-1].outvars[0] if gate_up.chain else gate_up.product


def _computed_from(product: core.Var, equations: Sequence[core.JaxprEqn]) -> list[core.JaxprEqn]:
    found, values = [], {product}
    for eqn in equations:
        if any(not isinstance(x, core.Literal) and x in values for x in eqn.invars):
            found.append(eqn)
            values.update(eqn.outvars)
    return found


def _gate_or_up(x: jax.Array, half: int, gate_up: GateUp) -> jax.Array:
    """Return an array's slice for gate (half 0) or up (1), or the array if it broadcasts."""
    shape, dimension = gate_up.product.aval.shape, gate_up.dimension
    size = shape[dimension]
    if x.ndim != len(shape) or x.shape[dimension] != size:
        return x
    if gate_up.is_interleaved:
        return lax.slice_in_dim(x, half, size, 2, dimension)
    return lax.slice_in_dim(x, half * (size // 2), (half + 1) * (size // 2), axis=dimension)


def _run(equations: Sequence[core.JaxprEqn], env: dict) -> None:
    """Evaluate equations in an environment, {variable: value}, and add their results to it."""
    for eqn in equations:
        operands = [_value(x, env) for x in eqn.invars]
        env |= zip(eqn.outvars, bound(eqn, eqn.params, operands), strict=True)


def _value(atom, env: dict):
    return atom.val if isinstance(atom, core.Literal) else env[atom]


@functools.lru_cache(maxsize=64)
def _conversion(old: np.dtype, new: np.dtype) -> core.JaxprEqn:
    convert = functools.partial(lax.convert_element_type, new_dtype=new)
    (eqn,) = as_jaxpr(jax.make_jaxpr(convert)(jax.ShapeDtypeStruct((), old))).eqns
    return eqn


# --- equality of functions ----------------------------------------------------------------------


class _Itself:
    """Wrapper of an object that is equal to the same object only."""

    def __init__(self, what):
        self._what = what

    def __hash__(self) -> int:
        return id(self._what)

    def __eq__(self, other) -> bool:
        return isinstance(other, _Itself) and self._what is other._what


def _structure(equations, arguments, results) -> tuple:
    """Return a key of equations that does not depend on the names of their variables."""
    numbers = {x: number for number, x in enumerate(arguments)}

    def atom(x):
        if not isinstance(x, core.Literal):
            return numbers[x]
        value = np.asarray(x.val)
        return type(x.val), value.dtype, value.shape, value.tobytes(), x.aval

    lines = []
    for eqn in equations:
        read = tuple(map(atom, eqn.invars))
        for x in eqn.outvars:
            numbers[x] = len(numbers)
        params = tuple((name, _parameter(value)) for name, value in sorted(eqn.params.items()))
        types = tuple(x.aval for x in eqn.outvars)
        lines.append((eqn.primitive, read, types, params))
    return tuple(x.aval for x in arguments), tuple(lines), tuple(map(atom, results))


def _parameter(value):
    jaxpr = as_jaxpr(value)
    if jaxpr is not None:
        if getattr(value, "consts", ()):
            return _Itself(value)
        return _structure(jaxpr.eqns, (*jaxpr.constvars, *jaxpr.invars), jaxpr.outvars)
    if isinstance(value, tuple | list):
        return tuple(map(_parameter, value))
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return type(value), value


# --- without roundings --------------------------------------------------------------------------

# Primitives that may be computed in float32 instead of a narrower dtype.
_WIDENED = (EXPRESSIONS.keys() | EXPANSIONS.keys()) - {
    "bitcast_convert_type",
    "nextafter",
    "reduce_precision",
}


def _without_roundings(function: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, int]:
    """Return a function computed in float32 instead of narrower floats, and the roundings saved."""
    count = 0

    def run(*arguments):
        nonlocal count
        count = 0
        env = dict(zip(function.jaxpr.invars, arguments, strict=True))

        def read(atom):
            return _value(atom, env)

        for eqn in function.jaxpr.eqns:
            narrow = [is_narrow(x.aval.dtype) for x in eqn.outvars]
            if eqn.primitive.name == "convert_element_type" and narrow == [True]:
                env[eqn.outvars[0]] = lax.convert_element_type(read(eqn.invars[0]), jnp.float32)
                count += np.dtype(eqn.invars[0].aval.dtype).itemsize >= 4
            elif eqn.primitive.name in _WIDENED:
                operands = [_widened(read(x), x.aval.dtype) for x in eqn.invars]
                env |= zip(eqn.outvars, bound(eqn, eqn.params, operands), strict=True)
                count += sum(narrow)
            else:
                operands = [_rounded(read(x), x.aval.dtype) for x in eqn.invars]
                env |= zip(eqn.outvars, bound(eqn, eqn.params, operands), strict=True)
        return [_rounded(read(x), x.aval.dtype) for x in function.jaxpr.outvars]

    widened_function = jax.make_jaxpr(run)(*function.in_avals)
    # Results, and operands of primitives that are not widened, are still rounded to their dtype.
    others = [eqn for eqn in function.jaxpr.eqns if eqn.primitive.name not in _WIDENED]
    read = [*function.jaxpr.outvars, *(x for eqn in others for x in eqn.invars)]
    rounded = {x for x in read if not isinstance(x, core.Literal)}
    widened = (eqn for eqn in function.jaxpr.eqns if eqn.primitive.name in _WIDENED)
    widened = {x for eqn in widened for x in eqn.outvars}
    kept = sum(is_narrow(x.aval.dtype) for x in rounded & widened)
    return (widened_function, count - kept) if count > kept else (function, 0)


def _widened(x, dtype):
    return lax.convert_element_type(x, jnp.float32) if is_narrow(dtype) else x


def _rounded(x, dtype):
    return x if jnp.result_type(x) == dtype else lax.convert_element_type(x, dtype)
