"""The primitive `tcgemm_blas`: one BLAS call of any routine.

Its only parameter is a `Call`. All operands carry the same number of batch dimensions in front of
their own, each of extent 1 or the batch's, so that batching adds one and never moves an array.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm.device import blas, blas_reference
from jax_tcgemm.primitives import lowering
from jax_tcgemm.primitives.rules import same_varying
from jax_tcgemm.problem.blas.call import Call
from jax_tcgemm.problem.blas.problem import BlasProblem
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system.jax_internals import batching, strong_type, xla

blas_p = core.Primitive("tcgemm_blas")
blas_p.multiple_results = True

# Why XLA runs a call of a program for several devices: it is never divided.
DIVIDED = "the program runs on several devices, and XLA must partition the call"


def bind(call: Call, *operands) -> list:
    """Binds the primitive: the call's results, `items` of them."""
    return blas_p.bind(*same_varying(*operands), call=call)


# --- typing: as XLA's formulation of the call is typed ------------------------------------------


@functools.lru_cache(maxsize=4096)
def _typed(call, mesh, *avals):
    del mesh  # Tracing depends on it.
    return jax.make_jaxpr(functools.partial(blas_reference.run, call))(*avals).out_avals


def _abstract_eval(*avals, call):
    return list(map(strong_type, _typed(call, jax.sharding.get_abstract_mesh(), *avals)))


blas_p.def_impl(functools.partial(xla.apply_primitive, blas_p))
blas_p.def_abstract_eval(_abstract_eval)


# --- batching -----------------------------------------------------------------------------------


def _batch(args, dims, *, call):
    """One more batch dimension in front, of extent 1 where an operand is not mapped."""
    args = [
        jnp.expand_dims(x, 0) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]
    return bind(call, *args), [0] * call.items


batching.primitive_batchers[blas_p] = _batch


# --- lowering -----------------------------------------------------------------------------------


def product_of(*types_and_params) -> BlasProblem:
    """Describe one call to its planner, from the types of operands and first result, and params."""
    *operands, _, params = types_and_params
    shapes = tuple(tuple(x.shape) for x in operands)
    return BlasProblem(params["call"], shapes, np.dtype(operands[0].dtype))


def _lower(ctx, *operands, device, obstacle, call):
    if not obstacle and partitioning.is_divided(ctx):
        obstacle = DIVIDED
    problem = product_of(*ctx.avals_in, ctx.avals_out[0], {"call": call})
    plan = blas.make_plan(problem, device, obstacle)
    run = functools.partial(blas.run, call, plan=plan, types=ctx.avals_out)
    return partitioning.lower_on_device(ctx, run, *operands)


lowering.register(blas_p, _lower)
