"""`jax.checkpoint_policies` that recognize this library's products.

JAX's policies look for `lax.dot_general`, and save nothing in a program with this library's
products. The policies here have the same names and also recognize this library's products::

    layer = jax.checkpoint(layer, policy=jax_tcgemm.checkpoint_policies.dots_saveable)

For a fused layer, the policies save the result and the pre-activation that derivatives need.

Examples:
  >>> import jax, jax.numpy as jnp, jax_tcgemm
  >>> from jax_tcgemm import checkpoint_policies
  >>> f = lambda x, w: jnp.sin(jax_tcgemm.matmul(jnp.sin(x), w)).sum()
  >>> saving = jax.checkpoint(f, policy=checkpoint_policies.dots_saveable)
  >>> x = jnp.ones((4, 4))
  >>> str(jax.make_jaxpr(jax.grad(saving, (0, 1)))(x, x)).count("tcgemm_dot_general[")
  3
"""

import functools
from collections.abc import Callable

import jax
from jax.extend.core.primitives import dot_general_p as lax_dot_general_p

from jax_tcgemm.primitives.blas import blas_p
from jax_tcgemm.primitives.dot_general import dot_general_p
from jax_tcgemm.primitives.epilogue_product import epilogue_product_p
from jax_tcgemm.primitives.ragged_dot import ragged_dot_p
from jax_tcgemm.primitives.tensor.contract import contract_p
from jax_tcgemm.problem.tensor.operation import dot_dimensions

_NO_BATCH = (((), ()), ((), ()))
_BATCH = (((), ()), ((0,), (0,)))


def _knowing_ours(policy: Callable) -> Callable:
    """A policy of JAX's that takes each of our products for a `lax.dot_general`."""

    @functools.wraps(policy)
    def knowing(primitive, *avals, **params):
        if (numbers := _product_dimensions(primitive, avals, params)) is not None:
            primitive, params = lax_dot_general_p, {"dimension_numbers": numbers}
        return policy(primitive, *avals, **params)

    return knowing


def _product_dimensions(primitive, avals, params):
    """Dimension numbers of a call that is a product of ours, None of others.

    Policies ask whether there is a batch, and no more.
    """
    if primitive is dot_general_p:
        return params["dimension_numbers"]
    if primitive is epilogue_product_p:
        return _BATCH if params["encoding"].num_batch else _NO_BATCH
    if primitive is ragged_dot_p:
        return _NO_BATCH
    if primitive is contract_p:
        return dot_dimensions(*params["modes"], params["result"])[0]
    if primitive is blas_p and params["call"].routine in ("gemm", "gemv"):
        return _BATCH if avals[0].ndim > 2 else _NO_BATCH
    return None


_jax = jax.checkpoint_policies

dots_saveable = checkpoint_dots = _knowing_ours(_jax.dots_saveable)
dots_with_no_batch_dims_saveable = _knowing_ours(_jax.dots_with_no_batch_dims_saveable)
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Callable:
    """Return the policy of `jax.checkpoint_policies.offload_dot_with_no_batch_dims`."""
    return _knowing_ours(_jax.offload_dot_with_no_batch_dims(offload_src, offload_dst))
