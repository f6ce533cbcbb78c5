"""The device-local product with a packed weight and a function as its epilogue.

As in epilogue.py, `make_plan` decides everything from shapes and dtypes, and
`product_with_epilogue` carries out a plan that is fused.
"""

import dataclasses
import functools
import math

import jax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device.call import call
from jax_tcgemm.device.epilogue import Made, stored
from jax_tcgemm.device.fused import (
    Fusible,
    out_dtype_of,
    refuse_to_fuse,
    runs_on_cpu_by_xla,
    unfused,
)
from jax_tcgemm.device.levels import Levels, placed_function, strides_of
from jax_tcgemm.device.packed import table_of
from jax_tcgemm.epilogues import InexpressibleError, emit
from jax_tcgemm.epilogues.joins import results_apart
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.packed import PackedProblem
from jax_tcgemm.problem.packed_weight import TILE, PackedFormat
from jax_tcgemm.selection.configs import PackedConfig, parse_or_none


@dataclasses.dataclass(frozen=True)
class Product:
    """A product with a packed weight and its epilogue: what a primitive call says.

    Attributes:
      options: options of the call.
      format: of the weight.
      problem: the product of all columns, without the epilogue.
      function: of the accumulators and the operands.
      shape: of an accumulator.
      num_rows: how many of its dimensions are rows.
      operand_shapes: of the operands, as they are held.
      by_group: for each operand, whether it is held by group, as (groups, 1, columns); the function
        is given, for each row, that of its group. None: none is.
      gated: whether there are two accumulators, of the first half of the columns and the second.
    """

    options: CallOptions
    format: PackedFormat
    problem: PackedProblem
    function: core.ClosedJaxpr
    shape: tuple[int, ...]
    num_rows: int
    operand_shapes: tuple[tuple[int, ...], ...]
    gated: bool
    by_group: tuple[bool, ...] | None = None

    @property
    def num_accumulators(self) -> int:
        """How many the function takes."""
        return 2 if self.gated else 1

    @property
    def levels(self) -> Levels:
        """The dimensions of an accumulator in the problem."""
        axes = [axis for axis, extent in enumerate(self.shape) if extent != 1]
        rows = tuple(axis for axis in axes if axis < self.num_rows)
        return Levels((), (), rows, tuple(axes[len(rows) :]))


@dataclasses.dataclass(frozen=True)
class Plan(Fusible):
    """How it runs on one device.

    `problem` is None where it can only be run unfused, for the reason in `choice.why`; so it is,
    too, where `choice.implementation` is "xla". `operands` are those of the function that the call
    takes, in their order there.
    """

    product: Product
    problem: PackedProblem | None
    operands: tuple[int, ...]
    choice: selection.Choice


def make_plan(product: Product, device: selection.Device, obstacle: str = "") -> Plan:
    """Chooses what runs a product with its epilogue.

    Args:
      product: the product.
      device: the device it will run on.
      obstacle: a phrase saying why it can only be run unfused; "" when it need not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run it.
    """
    options = product.options
    if runs_on_cpu_by_xla(options, device):
        return _unfused(product, unfused(obstacle or "on the CPU XLA runs the function"))
    folded = obstacle or _folded(product)
    if isinstance(folded, str):
        return _unfused(product, refuse_to_fuse(options, device, "packed", folded))
    choice = selection.select(options, folded[0], device)
    if not selection.is_forced(options) and _is_slower(folded[0], choice):
        why = "XLA's loop is faster for a long function of these rows"
        return _unfused(product, unfused(why))
    if choice.implementation == selection.XLA:
        choice = dataclasses.replace(choice, why=f"unfused: {choice.why}")
    return Plan(product, *folded, choice)


# With more rows than this, the mma.sync kernel computes a function of more instructions than that
# more slowly than XLA's loop does: gelu with a bias and a residual by 0.4 to 1.1 us on an H200.
_FEW_ROWS, _LONG_FUNCTION = 16, 30


def _is_slower(problem: PackedProblem, choice: selection.Choice) -> bool:
    is_of_few = isinstance(parse_or_none(choice.config), PackedConfig)
    is_long = problem.function.cost.work > _LONG_FUNCTION
    return is_of_few and is_long and problem.rows_of_weight > _FEW_ROWS


def _unfused(product: Product, choice: selection.Choice) -> Plan:
    return Plan(product, None, (), choice)


@functools.lru_cache(maxsize=1024)
def _folded(product: Product) -> tuple[PackedProblem, tuple[int, ...]] | str:
    """The problem and the operands that it takes, or what stands against it."""
    shape, levels = product.shape, product.levels
    if math.prod(shape) == 0:
        return "its result is empty"
    if math.prod(shape[product.num_rows :]) % TILE:
        return f"the columns of an accumulator are no multiple of {TILE}"
    function, beside, dimensions = results_apart(product.function)
    try:
        source, _ = emit(function, product.num_accumulators)
    except InexpressibleError as error:
        return str(error)
    strides = strides_of(source, product.operand_shapes, levels, shape, product.by_group)
    placed = placed_function(source, shape, levels, strides, beside)
    if isinstance(placed, str):
        return placed
    if not all(map(levels.are_rows_from, dimensions)):
        return "halves of a result are not the outermost columns of it"
    function, operands = placed
    is_grouped = product.problem.form == "grouped"
    if is_grouped and any(x.over in ("columns", "rows") for x in function.results):
        return "a result is a reduction, which XLA does"
    out_dtype = out_dtype_of(function)
    if out_dtype is None:
        return f"no implementation makes {function.results[0].dtype}"
    own = {"out_dtype": out_dtype, "gated": product.gated, "function": function}
    return dataclasses.replace(product.problem, **own), operands


def product_with_epilogue(plan: Plan, *arguments) -> list[jax.Array]:
    """Carries out a plan that is fused.

    Args:
      plan: the plan.
      *arguments: x, its scales if any, the arrays of the weight, of a grouped product group_sizes
        and group_offset, and the function's operands.
    """
    product, problem = plan.product, plan.problem
    number = len(arguments) - len(product.operand_shapes)
    (x, *others), operands = arguments[:number], arguments[number:]
    rows = [x.reshape(problem.m, x.shape[-1])]
    if problem.row_scales:
        rows.append(others.pop(0).reshape(problem.m))
    of_groups = len(others) - 2 * (problem.form == "grouped")
    arrays = [*rows, *others[:of_groups], *table_of(product.format), *others[of_groups:]]
    arrays += [stored(operands[i]) for i in plan.operands]
    extents = 1, problem.m, problem.d_columns
    made = Made(problem.function, product.function, product.shape, extents, product.levels)
    return made.results(call(problem, plan.choice, arrays, made.arrays(problem.out_dtype)))
