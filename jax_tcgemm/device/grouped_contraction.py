"""The device-local contraction over the tokens of each group, of scaled operands of 8 bits.

Their tokens are last, as a GPU's tensor cores want what is summed over.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import selection
from jax_tcgemm.device import grouped
from jax_tcgemm.device.call import call
from jax_tcgemm.device.fused import Fusible
from jax_tcgemm.problem.block_scales import BlockScales
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.precision import Numerics
from jax_tcgemm.problem.ragged import RaggedProblem

# A row of an operand begins on 16 bytes.
_TOKENS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Product:
    """What one call of the primitive says (primitives/scaled_ragged_contraction.py).

    Attributes:
      product: the product itself, of form contraction, in the dtype of the result.
      scales: of lhs (*batch, m, k), and of rhs (*batch, n, k).
    """

    product: grouped.Product
    scales: tuple[BlockScales, BlockScales]


@dataclasses.dataclass(frozen=True)
class Plan(Fusible):
    """How it runs on one device.

    `problem` and `numerics` are None where it can only be run unfused, for the reason in
    `choice.why`; so it is, too, where `choice.implementation` is "xla".
    """

    product: Product
    numerics: Numerics | None
    problem: RaggedProblem | None
    choice: selection.Choice

    @property
    def copies(self) -> tuple[str, ...]:
        """Every array that XLA must rewrite for the call."""
        is_padded = self.is_fused and self.problem.k != self.product.product.k
        padded = (f"{name} padded to {self.problem.k} tokens" for name in ("lhs", "rhs"))
        return (*self.bare.copies, *(padded if is_padded else ()))

    @property
    def bare(self) -> grouped.Plan:
        """Of the product alone."""
        return grouped.Plan(self.product.product, self.numerics, self.problem, self.choice)


def make_plan(product: Product, device: selection.Device, obstacle: str = "") -> Plan:
    """Chooses what runs a contraction.

    Args:
      product: the product.
      device: the device it will run on.
      obstacle: a phrase saying why it can only be run unfused; "" when it need not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run it.
    """
    own = product.product
    if device.platform == "cpu":
        obstacle = obstacle or "the CPU multiplies what is dequantised"
    folded = obstacle or _folded(product, device)
    if isinstance(folded, str):
        choice = selection.select(own.options, None, device, kind="ragged", obstacle=folded)
        return Plan(product, None, None, dataclasses.replace(choice, why=f"unfused: {folded}"))
    numerics, problem = folded
    nominal = grouped.of_nominal_rows(problem, own.options)
    choice = selection.select(own.options, problem, device, nominal=nominal)
    if choice.implementation == selection.XLA:
        choice = dataclasses.replace(choice, why=f"unfused: {choice.why}")
    return Plan(product, numerics, problem, choice)


@functools.lru_cache(maxsize=1024)
def _folded(product: Product, device: selection.Device) -> tuple[Numerics, RaggedProblem] | str:
    """What a `Plan` has of it, or what stands against it."""
    own = product.product
    numerics = grouped.numerics_of(own, device)
    if isinstance(numerics, str):
        return numerics
    if numerics.out_dtype != own.result_dtype:
        return f"no implementation gives {own.result_dtype}"
    k = -(-own.k // _TOKENS_AT_ONCE) * _TOKENS_AT_ONCE
    problem = grouped.problem_of(dataclasses.replace(own, k=k), numerics, device.platform)
    factors = tuple(dataclasses.replace(x.factors(1), inner_stride=0) for x in product.scales)
    return numerics, dataclasses.replace(problem, tokens_last=True, factors=factors)


def contraction(plan: Plan, lhs, rhs, group_sizes, group_offset, *scales) -> jax.Array:
    """Carries out a plan that is fused."""
    problem, product = plan.problem, plan.product.product
    more = problem.k - product.k
    if more:
        lhs, rhs = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) for x in (lhs, rhs))
    given = grouped.prepared(plan.bare, lhs, rhs, group_sizes, group_offset)
    given += [x.folded(own) for x, own in zip(plan.product.scales, scales, strict=True)]
    shape = (*product.batch_shape, product.groups, product.m, product.n)
    result = jax.ShapeDtypeStruct(shape, np.dtype(DTYPES[problem.out_dtype]))
    return call(problem, plan.choice, given, [result])[0]
