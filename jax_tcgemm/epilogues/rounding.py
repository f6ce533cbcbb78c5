"""Epilogues in narrower dtypes, for XLA: of stored accumulators, or of all values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm.epilogues.calls import written_out
from jax_tcgemm.epilogues.shard_function import REDUCTIONS
from jax_tcgemm.system.jax_internals import as_jaxpr, bound, function_of

# For each accumulator dtype, the dtypes to which XLA's products are rounded when stored.
_ROUNDED_TO = {
    np.dtype(np.float32): (np.dtype(jnp.bfloat16), np.dtype(np.float16)),
    np.dtype(np.float64): (np.dtype(np.float32),),
}


@functools.lru_cache(maxsize=1024)
def of_stored(
    function: core.ClosedJaxpr, num_accumulators: int = 1
) -> tuple[np.dtype, core.ClosedJaxpr]:
    """Return the dtype in which plain products are stored, and the epilogue of the stored products.

    The dtype is the accumulators', or a narrower one if the epilogue only reads the accumulators
    rounded to it.
    """
    jaxpr = as_jaxpr(function)
    accumulators = jaxpr.invars[:num_accumulators]
    accumulator_dtype = np.dtype(accumulators[0].aval.dtype)
    roundings = [_rounding(jaxpr, acc) for acc in accumulators]
    if None in roundings:
        return accumulator_dtype, function
    rounded = [eqn.outvars[0] for eqn in roundings]
    dtypes = {np.dtype(x.aval.dtype) for x in rounded}
    if len(dtypes) > 1 or not dtypes.issubset(_ROUNDED_TO.get(accumulator_dtype, ())):
        return accumulator_dtype, function
    rest = [x for x in jaxpr.eqns if not any(x is eqn for eqn in roundings)]
    arguments = (*rounded, *jaxpr.invars[num_accumulators:])
    return dtypes.pop(), function_of(arguments, rest, jaxpr.outvars)


def _rounding(jaxpr: core.Jaxpr, acc: core.Var) -> core.JaxprEqn | None:
    """Return the conversion that alone reads an accumulator; None if anything else reads it."""
    readers = [eqn for eqn in jaxpr.eqns if any(x is acc for x in eqn.invars)]
    if len(readers) != 1 or any(x is acc for x in jaxpr.outvars):
        return None
    return readers[0] if readers[0].primitive.name == "convert_element_type" else None


@functools.lru_cache(maxsize=1024)
def narrowed(
    function: core.ClosedJaxpr, num_accumulators: int, dtype: np.dtype
) -> core.ClosedJaxpr:
    """Return an epilogue that takes accumulators in `dtype` and computes in this dtype.

    `dtype` replaces the accumulators' dtype in all values except reductions. The dtypes of the
    results do not change.
    """
    flat = written_out(function)
    wide = np.dtype(flat.in_avals[0].dtype)
    accs = [x.update(dtype=dtype) for x in flat.in_avals[:num_accumulators]]

    def convert(x, target):
        return x if x.dtype == target else lax.convert_element_type(x, target)

    def run(*arguments):
        known = dict(zip(flat.jaxpr.invars, arguments, strict=True))
        known |= zip(flat.jaxpr.constvars, flat.consts, strict=True)

        def find(atom, target):
            x = atom.val if isinstance(atom, core.Literal) else known[atom]
            return jnp.asarray(x, target) if atom.aval.dtype == wide else x

        for eqn in flat.jaxpr.eqns:
            compute_dtype = wide if eqn.primitive.name in REDUCTIONS else dtype
            operands = [find(x, compute_dtype) for x in eqn.invars]
            params = {k: compute_dtype if _is_dtype(v, wide) else v for k, v in eqn.params.items()}
            known |= dict(zip(eqn.outvars, bound(eqn, params, operands), strict=True))
        found = (find(x, x.aval.dtype) for x in flat.jaxpr.outvars)
        return [convert(x, old.dtype) for x, old in zip(found, flat.out_avals, strict=True)]

    return jax.make_jaxpr(run)(*accs, *flat.in_avals[num_accumulators:])


def _is_dtype(value, dtype: np.dtype) -> bool:
    return isinstance(value, np.dtype) and value == dtype
