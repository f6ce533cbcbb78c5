"""The function that a group of equations is: of the accumulator, and of what the group reads.

Groups that are alike have one function, the same object, so that what is planned, generated and
compiled for it is so once.
"""

import collections
import contextlib
import functools
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm.epilogues.expressions import EXPRESSIONS, is_narrow
from jax_tcgemm.epilogues.values import EXPANSIONS
from jax_tcgemm.system.jax_internals import (
    as_jaxpr,
    bound,
    function_of,
    like,
    new_variable,
    with_context_of,
)

_MOST_KNOWN = 4096
_known: collections.OrderedDict = collections.OrderedDict()
_lock = threading.Lock()


def group_function(
    product: core.JaxprEqn,
    accumulator: np.dtype,
    equations: Sequence[core.JaxprEqn],
    inputs: Sequence[core.Var],
    results: Sequence[core.Var],
    *,
    wide: bool = False,
) -> tuple[core.ClosedJaxpr, int]:
    """Makes a function of equations, or finds it.

    Args:
      product: the equation of the product.
      accumulator: the dtype that it accumulates in.
      equations: what follows, in order.
      inputs: the variables that they read besides the product.
      results: the variables to return, the product itself perhaps among them.
      wide: leave out roundings to narrower dtypes between the accumulator and the results.

    Returns:
      The function of the accumulator and the inputs, and how many roundings it leaves out.
    """
    (out,) = product.outvars
    key = _structure(equations, (out, *inputs), results), np.dtype(accumulator), wide
    with _lock:
        if key in _known:
            _known.move_to_end(key)
            return _known[key]
    made = _exact(product, accumulator, equations, inputs, results), 0
    if wide:
        # What cannot be traced outside of its program stays as it is.
        with contextlib.suppress(Exception):
            made = _wide(made[0])
    with _lock:
        made = _known.setdefault(key, made)
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return made


def _exact(product, accumulator, equations, inputs, results) -> core.ClosedJaxpr:
    (out,) = product.outvars
    if out.aval.dtype == accumulator:
        return function_of((out, *inputs), equations, results)
    aval = like(out.aval, out.aval.shape, accumulator, out.aval.sharding)
    acc = new_variable(out, aval)
    conversion = with_context_of(_conversion(accumulator, out.aval.dtype), product)
    conversion = conversion.replace(invars=[acc], outvars=[out], source_info=product.source_info)
    return function_of((acc, *inputs), (conversion, *equations), results)


@functools.lru_cache(maxsize=64)
def _conversion(old: np.dtype, new: np.dtype) -> core.JaxprEqn:
    convert = functools.partial(lax.convert_element_type, new_dtype=new)
    (eqn,) = as_jaxpr(jax.make_jaxpr(convert)(jax.ShapeDtypeStruct((), old))).eqns
    return eqn


# --- what makes two functions the same ----------------------------------------------------------


class _Itself:
    """An object that equals itself only."""

    def __init__(self, what):
        self._what = what

    def __hash__(self) -> int:
        return id(self._what)

    def __eq__(self, other) -> bool:
        return isinstance(other, _Itself) and self._what is other._what


def _structure(equations, arguments, results) -> tuple:
    """What equations do, whatever their variables are called."""
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

# Whose roundings are not what they are for.
_WIDENED = (EXPRESSIONS.keys() | EXPANSIONS.keys()) - {
    "bitcast_convert_type",
    "nextafter",
    "reduce_precision",
}


def _wide(function: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, int]:
    """The same function in float32 where it is in narrower floats; and how many roundings go."""
    count = 0

    def run(*arguments):
        nonlocal count
        count = 0
        known = dict(zip(function.jaxpr.invars, arguments, strict=True))

        def find(atom):
            return atom.val if isinstance(atom, core.Literal) else known[atom]

        for eqn in function.jaxpr.eqns:
            narrow = [is_narrow(x.aval.dtype) for x in eqn.outvars]
            if eqn.primitive.name == "convert_element_type" and narrow == [True]:
                known[eqn.outvars[0]] = lax.convert_element_type(find(eqn.invars[0]), jnp.float32)
                count += np.dtype(eqn.invars[0].aval.dtype).itemsize >= 4
            elif eqn.primitive.name in _WIDENED:
                operands = [_widened(find(x), x.aval.dtype) for x in eqn.invars]
                known |= zip(eqn.outvars, bound(eqn, eqn.params, operands), strict=True)
                count += sum(narrow)
            else:
                operands = [_rounded(find(x), x.aval.dtype) for x in eqn.invars]
                known |= zip(eqn.outvars, bound(eqn, eqn.params, operands), strict=True)
        return [_rounded(find(x), x.aval.dtype) for x in function.jaxpr.outvars]

    made = jax.make_jaxpr(run)(*function.in_avals)
    # The last rounding of what is returned stays.
    results = {x for x in function.jaxpr.outvars if not isinstance(x, core.Literal)}
    computed = {x for eqn in function.jaxpr.eqns for x in eqn.outvars}
    kept = sum(is_narrow(x.aval.dtype) for x in results & computed)
    return (made, count - kept) if count > kept else (function, 0)


def _widened(x, dtype):
    return lax.convert_element_type(x, jnp.float32) if is_narrow(dtype) else x


def _rounded(x, dtype):
    return x if jnp.result_type(x) == dtype else lax.convert_element_type(x, dtype)
