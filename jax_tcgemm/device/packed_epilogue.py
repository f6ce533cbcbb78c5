"""The device-local product with a packed weight and a function as its epilogue."""

import dataclasses
import functools
import math

import jax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import fused
from jax_tcgemm.device.call import call
from jax_tcgemm.device.epilogue import Made, stored
from jax_tcgemm.device.fused import FusibleProduct, Plan, out_dtype_of, unfused
from jax_tcgemm.device.levels import Levels, placed_function, strides_of
from jax_tcgemm.device.packed import table_of
from jax_tcgemm.epilogues import InexpressibleError, emit
from jax_tcgemm.epilogues.concatenation import split_concatenated_results
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.packed import PackedProblem
from jax_tcgemm.problem.packed_weight import TILE, PackedFormat
from jax_tcgemm.selection.configs import PackedConfig, parse_or_none


@dataclasses.dataclass(frozen=True)
class Product(FusibleProduct):
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

    kind = "packed"

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

    def folded(self, device: selection.Device) -> "Folded | str":
        """Return the problem with the function in its epilogue, or why there is none."""
        del device
        return _folded(self)

    def select(self, folded: "Folded", device: selection.Device) -> selection.Choice:
        """Select what runs the product, unfused where XLA's loop is known to be faster."""
        choice = super().select(folded, device)
        if not selection.is_forced(self.options) and _is_slower(folded.problem, choice):
            return unfused("XLA's loop is faster for a long function of these rows")
        return choice

    def run(self, plan: Plan, *arguments: jax.Array) -> list[jax.Array]:
        """Return the function's results.

        Args:
          plan: the plan.
          *arguments: x, its scales if any, the arrays of the weight, of a grouped product
            group_sizes and group_offset, and the function's operands.
        """
        problem, number = plan.problem, len(arguments) - len(self.operand_shapes)
        (x, *others), operands = arguments[:number], arguments[number:]
        rows = [x.reshape(problem.m, x.shape[-1])]
        if problem.row_scales:
            rows.append(others.pop(0).reshape(problem.m))
        of_groups = len(others) - 2 * (problem.form == "grouped")
        arrays = [*rows, *others[:of_groups], *table_of(self.format), *others[of_groups:]]
        arrays += [stored(operands[i]) for i in plan.folded.operands]
        extents = 1, problem.m, problem.d_columns
        made = Made(problem.function, self.function, self.shape, extents, self.levels)
        return made.results(call(problem, plan.choice, arrays, made.arrays(problem.out_dtype)))


@dataclasses.dataclass(frozen=True)
class Folded(fused.Folded):
    """A product with its epilogue as one problem.

    Attributes:
      problem: the problem.
      operands: those of the function that the call takes, in their order there.
    """

    problem: PackedProblem
    operands: tuple[int, ...]


# With more rows than this, the mma.sync kernel computes a function of more instructions than that
# more slowly than XLA's loop does: gelu with a bias and a residual by 0.4 to 1.1 us on an H200, and
# gelu with a bias of experts by 1.1 to 3.5 us.
_FEW_ROWS, _FEW_ROWS_OF_EXPERTS, _LONG_FUNCTION = 16, 1, 30


def _is_slower(problem: PackedProblem, choice: selection.Choice) -> bool:
    is_of_few = isinstance(parse_or_none(choice.config), PackedConfig)
    is_long = problem.function.cost.work > _LONG_FUNCTION
    few = _FEW_ROWS_OF_EXPERTS if problem.form == "grouped" else _FEW_ROWS
    return is_of_few and is_long and problem.rows_of_weight > few


@functools.lru_cache(maxsize=1024)
def _folded(product: Product) -> Folded | str:
    """The product as one problem, or what stands against it."""
    shape, levels = product.shape, product.levels
    if math.prod(shape) == 0:
        return "its result is empty"
    if math.prod(shape[product.num_rows :]) % TILE:
        return f"the columns of an accumulator are no multiple of {TILE}"
    function, beside, dimensions = split_concatenated_results(product.function)
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
    return Folded(dataclasses.replace(product.problem, **own), operands)
