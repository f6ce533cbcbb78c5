"""Lowering of the primitive `tcgemm_all_reduce` (sharding/all_reduce.py)."""

import math

import jax
import numpy as np
from jax import lax

from jax_tcgemm.device import request
from jax_tcgemm.device.call import call
from jax_tcgemm.primitives import lowering
from jax_tcgemm.problem.all_reduce import AllReduceProblem
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.sharding.all_reduce import all_reduce_p
from jax_tcgemm.system import jax_internals


def product_of(x, *out_and_params) -> request.Request:
    """Describe one call to its planner, from the types of operand and result, and params."""
    params = out_and_params[-1]
    return request.Request("all_reduce", params["options"], _problem(x, params))


def _problem(x, params) -> AllReduceProblem | str:
    if not params["covers_mesh"]:
        return "the axes must cover all devices of the mesh"
    if jax.process_count() > 1:
        return "the devices belong to several processes"
    if (name := DTYPE_NAMES.get(np.dtype(x.dtype))) not in ("f16", "bf16", "f32"):
        return f"the dtype must be float16, bfloat16 or float32, got {x.dtype}"
    return AllReduceProblem(math.prod(x.shape), params["devices"], name)


def _lower(ctx, x, *, device, obstacle, **params):
    if not obstacle and jax_internals.is_exported(ctx):
        obstacle = "it is exported, and may run on devices without access to each other's memory"
    plan = request.make_plan(product_of(*ctx.avals_in, params), device, obstacle)

    def on_device(x):
        if plan.runs_by_xla:
            return (lax.psum(x, params["axes"]),)
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return tuple(call(plan.problem, plan.choice, [x], [result]))

    return partitioning.lower_on_device(ctx, on_device, x)


lowering.register(all_reduce_p, _lower)
