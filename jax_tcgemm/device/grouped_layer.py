"""The device-local grouped layer: a grouped product with what is fused to it, as a function of it.

Without anything fused it is a plain grouped product.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import selection
from jax_tcgemm.device import grouped, grouped_epilogue
from jax_tcgemm.device.dense import of_device
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.layers import activated
from jax_tcgemm.problem.ragged import RaggedProblem


@dataclasses.dataclass(frozen=True)
class Product:
    """What one call of the primitive says (primitives/ragged_dot.py).

    Attributes:
      product: the grouped product.
      activation: a name in `activations.ACTIVATIONS`.
      bias_dtype: dtype of the bias, None without one.
    """

    product: grouped.Product
    activation: str
    bias_dtype: np.dtype | None

    @property
    def is_layer(self) -> bool:
        """Whether anything follows the product."""
        return self.activation != "none" or self.product.gated or self.bias_dtype is not None


@dataclasses.dataclass(frozen=True)
class FunctionPlan:
    """How a layer runs as a grouped product with a function."""

    product: Product
    plan: grouped_epilogue.Plan
    choice: selection.Choice

    @property
    def problem(self) -> RaggedProblem | None:
        """As of `grouped_epilogue.Plan`."""
        return self.plan.problem

    @property
    def copies(self) -> tuple[str, ...]:
        """As of `grouped_epilogue.Plan`."""
        return self.plan.copies if self.plan.is_fused else ()

    @property
    def code(self) -> str:
        """As of `grouped_epilogue.Plan`."""
        return self.plan.code

    @property
    def flips_rhs(self) -> bool:
        """Whether matrices are to be turned: only those that `host` multiplies by."""
        return False


Plan = grouped.Plan | FunctionPlan


def make_plan(product: Product, device: selection.Device, obstacle: str = "") -> Plan:
    """Chooses what runs a grouped product and what is fused to it.

    Args:
      product: the product.
      device: the device it will run on.
      obstacle: a phrase saying why only XLA's own ragged_dot can be used; "" when not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run the product.
    """
    if not product.is_layer:
        return grouped.make_plan(product.product, device, obstacle)
    bare = of_device(product.product, device)
    product = dataclasses.replace(product, product=bare)
    plan = grouped_epilogue.make_plan(_with_function(product), device, obstacle)
    choice = plan.choice
    if not plan.is_fused:
        why = f"as bare grouped products with steps of XLA's around them; {choice.why}"
        choice = dataclasses.replace(choice, why=why)
    return FunctionPlan(product, plan, choice)


def _with_function(product: Product) -> grouped_epilogue.Product:
    bare = product.product
    num_products = 2 if bare.gated else 1
    num_biases = 0 if product.bias_dtype is None else num_products
    function = _function(
        *(product.activation, num_products, num_biases, product.bias_dtype),
        *((*bare.batch_shape, bare.m, bare.n), bare.result_dtype),
    )
    held = (*bare.batches[1], bare.groups, 1, bare.n)
    bare = dataclasses.replace(bare, result_dtype=np.dtype(wide_dtype(bare.result_dtype)))
    return grouped_epilogue.Product(bare, function, (held,) * num_biases, (True,) * num_biases)


@functools.lru_cache(maxsize=1024)
def _function(activation, num_products, num_biases, bias_dtype, shape, dtype):
    """What follows the products as a jaxpr of them and of the biases of each row's group."""
    wide = wide_dtype(dtype)

    def function(*arguments):
        zs, biases = arguments[:num_products], arguments[num_products:]
        if biases:
            zs = [z + bias.astype(wide) for z, bias in zip(zs, biases, strict=True)]
        return [activated(activation, zs).astype(dtype)]

    accumulators = [jax.ShapeDtypeStruct(shape, wide)] * num_products
    biases = [jax.ShapeDtypeStruct(shape, bias_dtype) for _ in range(num_biases)]
    return jax.make_jaxpr(function)(*accumulators, *biases)


def ragged_dot(
    lhs, rhs, group_sizes, group_offset, bias=None, gather=None, *, plan: Plan
) -> jax.Array:
    """Carries out a plan that is not XLA's, or that of a plain product."""
    if not isinstance(plan, FunctionPlan):
        return grouped.ragged_dot(lhs, rhs, group_sizes, group_offset, gather, plan=plan)
    biases = []
    if bias is not None and plan.product.product.gated:
        biases = [lax.index_in_dim(bias, half, bias.ndim - 2) for half in range(2)]
    elif bias is not None:
        biases = [jnp.expand_dims(bias, -2)]
    factors = lhs, rhs, group_sizes, group_offset, gather
    (out,) = grouped_epilogue.product_with_epilogue(plan.plan, factors, (), biases)
    return out
