"""The primitive `tcgemm_epilogue_dot_general`: a product and an elementwise function of it.

    acc = transpose(dot_general(lhs, rhs, dimension_numbers), permutation)
    results = function(acc, *operands)

`acc` has the dtype that the product accumulates in (`accumulator_dtype`); the results are what the
function makes of it. `unfused` is the same in JAX, by a plain product and XLA: it types the
primitive and runs it wherever nothing takes it as one call.

Parameters, all static: those of `tcgemm_dot_general`, whose preferred_element_type is the
accumulator's here and whose out_sharding is that of `acc`, and function, a closed jaxpr without
constants.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import dense, epilogue
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives import lowering
from jax_tcgemm.primitives.rules import same_varying
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import xla

epilogue_dot_general_p = core.Primitive("tcgemm_epilogue_dot_general")
epilogue_dot_general_p.multiple_results = True


def accumulator_dtype(lhs_dtype, rhs_dtype) -> np.dtype:
    """What the product of such operands accumulates in: at least float32, of integers int32."""
    dtype = jnp.promote_types(lhs_dtype, rhs_dtype)
    if jnp.issubdtype(dtype, jnp.integer) and np.dtype(dtype).itemsize <= 4:
        return np.dtype(np.int32)
    return wide_dtype(dtype)


def epilogue_dot_general(
    lhs,
    rhs,
    *operands,
    op,
    dimension_numbers,
    function: core.ClosedJaxpr,
    permutation=None,
    precision=None,
    out_sharding=None,
    implementation=None,
    config=None,
) -> list[jax.Array]:
    """Binds the primitive; arguments are checked and canonical already."""
    jax_internals.register_imported()
    if permutation is None:
        permutation = tuple(range(plain.result_ndim(lhs.ndim, rhs.ndim, dimension_numbers)))
    return epilogue_dot_general_p.bind(
        *same_varying(lhs, rhs, *operands),
        op=op,
        dimension_numbers=dimension_numbers,
        permutation=tuple(permutation),
        precision=precision,
        preferred_element_type=accumulator_dtype(lhs.dtype, rhs.dtype),
        out_sharding=out_sharding,
        implementation=implementation,
        config=config,
        function=function,
    )


def unfused(lhs, rhs, *operands, function: core.ClosedJaxpr, **params) -> list[jax.Array]:
    """The same by a plain product and what XLA makes of the function."""
    acc = plain.dot_general(lhs, rhs, **params)
    return core.jaxpr_as_fun(function)(acc, *operands)


# --- typing -------------------------------------------------------------------------------------


def _abstract_eval(*avals, **params):
    # What was asked for by name is found out when the primitive is lowered.
    unnamed = params | {"implementation": None, "config": None}
    with lowering.named(params["op"]), selection.unseen():
        jaxpr = jax.make_jaxpr(functools.partial(unfused, **unnamed))(*avals)
    lowering.expect(epilogue.make_plan, product_of, *avals, params)
    return jaxpr.out_avals, set()


epilogue_dot_general_p.def_impl(functools.partial(xla.apply_primitive, epilogue_dot_general_p))
epilogue_dot_general_p.def_effectful_abstract_eval(_abstract_eval)


# --- lowering -----------------------------------------------------------------------------------


def product_of(lhs, rhs, *rest) -> epilogue.Product:
    """What one call of the primitive says, from the types of its operands and its params."""
    *operands, params = rest
    acc = params["function"].in_avals[0]
    product = plain.product_of(lhs, rhs, acc, params)
    return epilogue.Product(product, params["function"], tuple(tuple(x.shape) for x in operands))


def _lower(ctx, *operands, device, obstacle, **params):
    product = product_of(*ctx.avals_in, params)
    plan = epilogue.make_plan(product, device, obstacle)
    if not plan.is_fused:
        unfused_call = functools.partial(unfused, **params)
        return partitioning.lower_on_device(ctx, unfused_call, *operands)
    on_device = functools.partial(epilogue.product_with_epilogue, plan)
    return partitioning.lower_on_device(ctx, on_device, *operands)


lowering.register(epilogue_dot_general_p, _lower)
