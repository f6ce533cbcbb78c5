"""Plan of a dense product: fold the dimensions and select what runs the product.

`make_plan` decides everything from shapes and dtypes; `dot_general` (call.py) carries out a plan
and `explain` prints one, so what is explained is what runs.

"""

import dataclasses
import math

from jax_tcgemm import selection
from jax_tcgemm.device import split_precision
from jax_tcgemm.device.dense.folding import Fold
from jax_tcgemm.device.dense.product import (
    Product,
    fold_product,
    layout_of,
    of_device,
    of_nominal_rows,
    split_of,
)
from jax_tcgemm.device.plan import BasePlan
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.precision import Numerics
from jax_tcgemm.selection import xla_forms


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """How a product runs on one device.

    `problem` is None where XLA's dot is all there is; `numerics` and `fold` are then None too,
    and `choice.why` says why.
    """

    product: Product
    platform: str
    numerics: Numerics | None
    fold: Fold | None
    problem: Problem | None
    choice: selection.Choice

    @property
    def has_terms(self) -> bool:
        """Whether what is multiplied are terms of the operands."""
        return self.numerics is not None and self.numerics.terms is not None

    @property
    def repeats_row(self) -> bool:
        """Whether there is one row that must be as it were among others.

        `host` adds up a product with a single row in another order.
        """
        product = self.product
        if self.platform != "cpu" or not product.options.invariant_rows:
            return False
        (contract, _), (batch, _) = product.dimension_numbers
        own = (n for axis, n in enumerate(product.lhs_shape) if axis not in (*contract, *batch))
        return math.prod(own) == 1

    @property
    def is_of_xla(self) -> bool:
        """Whether XLA computes it from the operands as they are."""
        return self.runs_by_xla and not self.has_terms

    @property
    def is_dot_of_xla(self) -> bool:
        """Whether it is XLA's own dot of the operands as they are."""
        return self.is_of_xla and self.choice.config == xla_forms.DEFAULT

    @property
    def copies(self) -> tuple[str, ...]:
        """Every array XLA must rewrite for the call, with its bytes read and written."""
        if self.is_of_xla:
            return ()
        return copies(self.product, self.numerics, self.fold)


def permuted_bytes(plan: Plan) -> int:
    """Bytes that are read and written to permute what a call of ours cannot read in place."""
    product, folded = plan.product, plan.fold
    if plan.has_terms:
        return sum(_split_bytes(product, plan.numerics, is_rhs) for is_rhs in (False, True))
    arrays = (
        (product.lhs_shape, product.lhs_dtype, folded.lhs_order),
        (product.rhs_shape, product.rhs_dtype, folded.rhs_order),
        (product.result_shape, product.result_dtype, folded.result_order),
    )
    return sum(
        2 * math.prod(shape) * dtype.itemsize for shape, dtype, order in arrays if order is not None
    )


def _split_bytes(product: Product, numerics: Numerics, is_rhs: bool) -> int:
    """Bytes that are read and written to split an operand into terms."""
    shape, dtype, new_dtype = (
        (product.lhs_shape, product.lhs_dtype, numerics.lhs_dtype),
        (product.rhs_shape, product.rhs_dtype, numerics.rhs_dtype),
    )[is_rhs]
    stored = math.prod(layout_of(product, numerics).stored[is_rhs])
    return math.prod(shape) * dtype.itemsize + stored * new_dtype.itemsize


def copies(product: Product, numerics: Numerics, folded: Fold) -> tuple[str, ...]:
    """The arrays that XLA must rewrite so that a product can be called as it was folded."""
    found = []
    for name, shape, dtype, read, order in (
        ("lhs", product.lhs_shape, product.lhs_dtype, numerics.lhs_dtype, folded.lhs_order),
        ("rhs", product.rhs_shape, product.rhs_dtype, numerics.rhs_dtype, folded.rhs_order),
    ):
        if numerics.terms is not None:
            by = split_of(product, numerics, name == "rhs")
            moved = _split_bytes(product, numerics, name == "rhs") / 1e6
            found.append(f"{name} split into terms of {read} by {by} ({moved:.3g} MB)")
            continue  # They are permuted as they are written.
        if dtype != read:
            moved = _bytes(shape, dtype.itemsize + read.itemsize)
            found.append(f"{name} converted to {read} ({moved})")
        if order is not None:
            found.append(f"{name} permuted to {order} ({_bytes(shape, 2 * read.itemsize)})")
    if folded.result_order is not None:
        moved = _bytes(product.result_shape, 2 * numerics.out_dtype.itemsize)
        found.append(f"result permuted to {folded.result_order} ({moved})")
    if product.result_dtype != numerics.out_dtype:
        components = 2 if numerics.terms is not None and numerics.terms.is_complex else 1
        moved = product.result_dtype.itemsize + components * numerics.out_dtype.itemsize
        moved = _bytes(product.result_shape, moved)
        found.append(f"result converted to {product.result_dtype} ({moved})")
    return tuple(found)


def _bytes(shape, itemsize: int) -> str:
    return f"{math.prod(shape) * itemsize / 1e6:.3g} MB"


def make_plan(product: Product, device: selection.Device, obstacle: str = "") -> Plan:
    """Folds a product and chooses what runs it.

    Args:
      product: the product.
      device: the device it will run on.
      obstacle: a phrase saying why, all the same, only XLA's own dot can be used; "" when not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run the product.
    """
    product = of_device(product, device)
    obstacle = obstacle or selection.obstacle_of(product.options)
    folded = obstacle or fold_product(product, device)
    if isinstance(folded, str):
        obstacle, folded = folded, (None, None, None)
    # XLA has no product of terms to stay with.
    if not (obstacle or selection.is_forced(product.options) or folded[0].terms is not None):
        obstacle = selection.reason_to_stay(product.options, folded[-1], device)
        obstacle = obstacle or _gain_of_xla(product, *folded, device)
    nominal = None if obstacle else of_nominal_rows(folded[-1], folded[1], product.options)
    choice = selection.select(
        product.options, folded[-1], device, obstacle=obstacle, nominal=nominal
    )
    if choice.implementation == selection.XLA and folded[0] and folded[0].terms:
        # Its product takes the terms that it makes itself, of which nothing is filled up.
        folded = split_precision.split_by_xla(folded[0]), *folded[1:]
    return Plan(product, device.platform, *folded, choice)


def _gain_of_xla(
    product: Product, numerics: Numerics, folded: Fold, problem: Problem, device: selection.Device
) -> str:
    """Why XLA is faster where our call needs operands or the result converted; "" where not."""
    if device.platform != "cuda" or numerics.terms is not None:
        return ""
    loops, num_bytes = 0, 0
    for shape, dtype, read, order in (
        (product.lhs_shape, product.lhs_dtype, numerics.lhs_dtype, folded.lhs_order),
        (product.rhs_shape, product.rhs_dtype, numerics.rhs_dtype, folded.rhs_order),
        (product.result_shape, product.result_dtype, numerics.out_dtype, folded.result_order),
    ):
        if dtype != read or order is not None:
            loops += 1
            num_bytes += math.prod(shape) * (dtype.itemsize + read.itemsize)
    return selection.gain_of_converting(problem, device, loops, num_bytes) if loops else ""
