"""What a product is rounded to, where that is the first that a function does with it."""

import functools

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm.system.jax_internals import as_jaxpr, function_of

# What products are rounded to by themselves, by what they accumulate in.
_ROUNDED_TO = {
    np.dtype(np.float32): (np.dtype(jnp.bfloat16), np.dtype(np.float16)),
    np.dtype(np.float64): (np.dtype(np.float32),),
}


@functools.lru_cache(maxsize=1024)
def of_stored(function: core.ClosedJaxpr) -> tuple[np.dtype, core.ClosedJaxpr]:
    """The dtype that a plain product must be stored in for a function, and the function of that.

    The accumulator's own dtype; a narrower one, if all that the function does with the accumulator
    is to round it to that.
    """
    jaxpr = as_jaxpr(function)
    acc, own = jaxpr.invars[0], np.dtype(jaxpr.invars[0].aval.dtype)
    readers = [eqn for eqn in jaxpr.eqns if any(x is acc for x in eqn.invars)]
    if len(readers) != 1 or any(x is acc for x in jaxpr.outvars) or own not in _ROUNDED_TO:
        return own, function
    (eqn,) = readers
    rounded, dtype = eqn.outvars[0], np.dtype(eqn.outvars[0].aval.dtype)
    if eqn.primitive.name != "convert_element_type" or dtype not in _ROUNDED_TO[own]:
        return own, function
    rest = [x for x in jaxpr.eqns if x is not eqn]
    return dtype, function_of((rounded, *jaxpr.invars[1:]), rest, jaxpr.outvars)
