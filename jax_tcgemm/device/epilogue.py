"""The device-local product with a function as its epilogue: fold, say where operands lie, choose.

`make_plan` decides everything from shapes and dtypes, and `product_with_epilogue` carries out a
plan that is fused. What no implementation runs as one call is run unfused: as a plain product,
which is planned in its own right, and what XLA makes of the function. The plan says why.
"""

import dataclasses

import jax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import dense
from jax_tcgemm.device.folding import Fold
from jax_tcgemm.problem.gemm import Problem


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of given shapes and its epilogue: what a primitive call says.

    Attributes:
      product: the product itself, in the dtype that it accumulates in.
      function: of the accumulator and the operands.
      operand_shapes: theirs.
    """

    product: dense.Product
    function: core.ClosedJaxpr
    operand_shapes: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a product with an epilogue runs on one device.

    `problem` and `fold` are None where it can only be run unfused, for the reason in `choice.why`.
    With a problem, too, `choice.implementation` may be "xla": unfused.
    """

    product: Product
    fold: Fold | None
    problem: Problem | None
    choice: selection.Choice

    @property
    def is_fused(self) -> bool:
        """Whether one call runs it."""
        return self.choice.implementation != selection.XLA


def make_plan(product: Product, device: selection.Device, obstacle: str = "") -> Plan:
    """Folds a product with its epilogue and chooses what runs it.

    Args:
      product: the product.
      device: the device it will run on.
      obstacle: a phrase saying why it can only be run unfused; "" when it need not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run it.
    """
    choice = selection.Choice(
        selection.XLA, "default", "unfused: " + (obstacle or "the CPU runs functions by XLA")
    )
    return Plan(product, None, None, choice)


def product_with_epilogue(plan: Plan, lhs, rhs, *operands) -> list[jax.Array]:
    """Carries out a plan that is fused."""
    raise NotImplementedError
