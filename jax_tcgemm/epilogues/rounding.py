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
def of_stored(
    function: core.ClosedJaxpr, num_accumulators: int = 1
) -> tuple[np.dtype, core.ClosedJaxpr]:
    """The dtype that plain products must be stored in for a function, and the function of these.

    The accumulators' own dtype; a narrower one, if all that the function does with each of them is
    to round it to that.
    """
    jaxpr = as_jaxpr(function)
    accumulators = jaxpr.invars[:num_accumulators]
    own = np.dtype(accumulators[0].aval.dtype)
    roundings = [_rounding(jaxpr, acc) for acc in accumulators]
    if None in roundings:
        return own, function
    rounded = [eqn.outvars[0] for eqn in roundings]
    dtypes = {np.dtype(x.aval.dtype) for x in rounded}
    if len(dtypes) > 1 or not dtypes.issubset(_ROUNDED_TO.get(own, ())):
        return own, function
    rest = [x for x in jaxpr.eqns if not any(x is eqn for eqn in roundings)]
    arguments = (*rounded, *jaxpr.invars[num_accumulators:])
    return dtypes.pop(), function_of(arguments, rest, jaxpr.outvars)


def _rounding(jaxpr: core.Jaxpr, acc: core.Var) -> core.JaxprEqn | None:
    """The conversion that is all that is done with an accumulator, None where it is not."""
    readers = [eqn for eqn in jaxpr.eqns if any(x is acc for x in eqn.invars)]
    if len(readers) != 1 or any(x is acc for x in jaxpr.outvars):
        return None
    return readers[0] if readers[0].primitive.name == "convert_element_type" else None
