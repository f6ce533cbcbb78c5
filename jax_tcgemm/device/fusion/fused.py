"""Plans of products with an epilogue: one call of an implementation, or unfused.

An unfused call runs its products by plans of their own, and XLA computes the rest. `make_plan`
decides everything from shapes and dtypes, and `Plan.run` carries out a plan that is fused. Each
kind of product is a subclass of `FusibleProduct`: in epilogue.py, packed.py,
grouped_epilogue.py and grouped_contraction.py.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

import jax

from jax_tcgemm import selection
from jax_tcgemm.device.plan import BasePlan
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.function import Function

# Dtypes that stand for a D of another dtype, by their size.
_CARRIERS = {1: "u8", 4: "s32", 8: "f64"}


@dataclasses.dataclass(frozen=True)
class Folded:
    """A product with its epilogue as one problem, and what the call needs beside the problem."""

    problem: selection.AnyProblem


class FusibleProduct(abc.ABC):
    """A product with an epilogue: what a primitive call says, as a frozen dataclass.

    Attributes:
      kind: the kind of its problem, as `Problem.kind`.
      options: options of the call.
    """

    kind: ClassVar[str]
    options: CallOptions

    def on_device(self, device: selection.Device) -> Self:
        """Return the product as it is computed on a device."""
        del device
        return self

    def of_values(self, operands: Sequence) -> Self:
        """Return the product of these operands of the primitive, two of which may be one array."""
        del operands
        return self

    def plan(self, device: selection.Device, obstacle: str) -> "Plan":
        """Return the plan of the product on its device, with the arguments of `make_plan`."""
        if self.runs_by_xla(device):
            why = obstacle or "on the CPU XLA runs the function"
            return Plan(self, None, unfused(why))
        folded = obstacle or self.folded(device)
        if isinstance(folded, str):
            return Plan(self, None, self.refuse_to_fuse(device, folded))
        return Plan(self, folded, self.select(folded, device))

    def runs_by_xla(self, device: selection.Device) -> bool:
        """Return whether XLA computes the epilogue because no implementation of a CPU does."""
        may_be = selection.may_be_unfused(self.options) or self.options.implementation == "host"
        return device.platform == "cpu" and may_be

    @abc.abstractmethod
    def folded(self, device: selection.Device) -> Folded | str:
        """Return the one problem, or why the product cannot be fused."""

    def refuse_to_fuse(self, device: selection.Device, why: str) -> selection.Choice:
        """Return the choice of a call that cannot be fused.

        Raises:
          ValueError: if an implementation was asked for by name.
        """
        if not selection.may_be_unfused(self.options):
            selection.select(self.options, None, device, kind=self.kind, obstacle=why)
        return unfused(why)

    def select(self, folded: Folded, device: selection.Device) -> selection.Choice:
        """Select what runs the folded product; XLA runs it unfused."""
        nominal = self.of_nominal_rows(folded)
        choice = selection.select(self.options, folded.problem, device, nominal=nominal)
        if choice.implementation == selection.XLA:
            choice = dataclasses.replace(choice, why=f"unfused: {choice.why}")
        return choice

    def of_nominal_rows(self, folded: Folded) -> selection.AnyProblem | None:
        """Return the problem that selects a batch-invariant kernel; None without such a rule."""
        del folded
        return None

    def copies(self, plan: "Plan") -> tuple[str, ...]:
        """Return every array that XLA must rewrite for the call of a plan that is fused."""
        del plan
        return ()

    def xla_us(self, plan: "Plan", device: selection.Device) -> float | None:
        """Return the estimated time of XLA's program in place of the call of a fused plan."""
        return selection.xla_us(plan.problem, device)

    @abc.abstractmethod
    def run(self, plan: "Plan", *arguments: jax.Array) -> list[jax.Array]:
        """Return the results of a plan that is fused, from the operands of the primitive."""


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """How a product with an epilogue runs on one device.

    Attributes:
      product: the product.
      folded: the one problem; None if the product can only run unfused.
      choice: what runs the call; "xla" is unfused.
    """

    product: FusibleProduct
    folded: Folded | None
    choice: selection.Choice

    @property
    def problem(self) -> selection.AnyProblem | None:
        """The problem of the one call."""
        return self.folded and self.folded.problem

    @property
    def is_fused(self) -> bool:
        """Whether one call runs it."""
        return not self.runs_by_xla

    @property
    def code(self) -> str:
        """The generated code of the epilogue, "" if no kernel is compiled with it."""
        is_ours = self.is_fused and self.choice.implementation != "cublaslt"
        function = self.problem.function if is_ours else None
        return function.definitions if function else ""

    @property
    def copies(self) -> tuple[str, ...]:
        """Every array that XLA must rewrite for the call."""
        return self.product.copies(self) if self.is_fused else ()

    def xla_us(self, device: selection.Device) -> float | None:
        """Return the estimated time of XLA's program in place of the call, None if unfused."""
        return self.product.xla_us(self, device) if self.is_fused else None

    def run(self, *arguments: jax.Array) -> list[jax.Array]:
        """Carry out the plan, which must be fused, on the operands of the primitive."""
        return self.product.run(self, *arguments)


def make_plan(product: FusibleProduct, device: selection.Device, obstacle: str = "") -> Plan:
    """Fold a product with its epilogue and select what runs it.

    Args:
      product: the product.
      device: the device it will run on.
      obstacle: a phrase saying why it can only be run unfused; "" when it need not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run it.
    """
    return product.on_device(device).plan(device, obstacle)


def unfused(why: str) -> selection.Choice:
    """Return the choice of an unfused call."""
    return selection.Choice(selection.XLA, "default", f"unfused: {why}")


def out_dtype_of(function: Function) -> str | None:
    """Return the name of the dtype of D, or of a dtype of its size; None if there is neither."""
    dtype = function.results[0].dtype
    return DTYPE_NAMES.get(dtype) or _CARRIERS.get(dtype.itemsize)
