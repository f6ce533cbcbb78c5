"""Products with packed weights, and dequantized packed weights, on one device.

`Product` is planned by fused.py, with or without an epilogue in the kernel. `weight` carries out a
plan of request.py.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import request
from jax_tcgemm.device.call import call
from jax_tcgemm.device.fusion import fused
from jax_tcgemm.device.fusion.fused import FusibleProduct, Plan, out_dtype_of, unfused
from jax_tcgemm.device.fusion.levels import Levels, placed_function, strides_of
from jax_tcgemm.device.fusion.results import Made, stored
from jax_tcgemm.epilogues import InexpressibleError, emit
from jax_tcgemm.epilogues.concatenation import split_concatenated_results
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.operands.packed import PackedProblem
from jax_tcgemm.problem.operands.packed_weight import (
    TILE,
    PackedFormat,
    PackedWeight,
    stacked_dequantized,
)
from jax_tcgemm.selection.configs import PackedConfig, parse_or_none


@dataclasses.dataclass(frozen=True)
class Product(FusibleProduct):
    """A product with a packed weight, and its epilogue: what a primitive call says.

    Attributes:
      options: options of the call.
      format: format of the weight.
      problem: the product of all columns, without the epilogue.
      function: function of the accumulators and the epilogue's operands.
      shape: shape of an accumulator.
      num_row_dims: number of leading dimensions of an accumulator that are rows.
      operand_shapes: shapes of the epilogue's operands, as they are stored.
      by_group: for each operand, whether it is stored by group, as (groups, 1, columns); the
        function then takes the operand of each row's group. None: no operand is.
      gated: whether there are two accumulators, of the first half of the columns and the second.
      is_bare: whether there is no epilogue: the function only rounds the accumulator, whose columns
        are (tiles, 16).
    """

    kind = "packed"

    options: CallOptions
    format: PackedFormat
    problem: PackedProblem
    function: core.ClosedJaxpr
    shape: tuple[int, ...]
    num_row_dims: int
    operand_shapes: tuple[tuple[int, ...], ...]
    gated: bool
    is_bare: bool
    by_group: tuple[bool, ...] | None = None

    @property
    def num_accumulators(self) -> int:
        """How many the function takes."""
        return 2 if self.gated else 1

    @property
    def levels(self) -> Levels:
        """The dimensions of an accumulator in the problem."""
        axes = [axis for axis, extent in enumerate(self.shape) if extent != 1]
        rows = tuple(axis for axis in axes if axis < self.num_row_dims)
        return Levels((), (), rows, tuple(axes[len(rows) :]))

    def folded(self, device: selection.Device) -> "Folded | str":
        """Return the problem with the function in its epilogue, or why there is none."""
        del device
        return _bare(self) if self.is_bare else _folded(self)

    def runs_by_xla(self, device: selection.Device) -> bool:
        """Return whether XLA computes the epilogue because no implementation of a CPU does."""
        return not self.is_bare and super().runs_by_xla(device)

    def refuse_to_fuse(self, device: selection.Device, why: str) -> selection.Choice:
        """Return the choice of a call that cannot be fused, or of a bare product's weight."""
        if self.is_bare:
            how = {"kind": self.kind, "obstacle": why}
            return _dequantizing(selection.select(self.options, None, device, **how))
        return super().refuse_to_fuse(device, why)

    def select(self, folded: "Folded", device: selection.Device) -> selection.Choice:
        """Select what runs the product, unfused where XLA's loop is known to be faster."""
        if self.is_bare:
            return _dequantizing(selection.select(self.options, folded.problem, device))
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
        problem, num_arrays = plan.problem, len(arguments) - len(self.operand_shapes)
        (x, *others), operands = arguments[:num_arrays], arguments[num_arrays:]
        rows = [x.reshape(problem.m, x.shape[-1])]
        if problem.row_scales:
            rows.append(others.pop(0).reshape(problem.m))
        # The arrays of the weight, then group_sizes and group_offset of a grouped product.
        num_of_weight = len(others) - 2 * (problem.form == "grouped")
        arrays = [*rows, *others[:num_of_weight], *_table_of(self.format), *others[num_of_weight:]]
        arrays += [stored(operands[i]) for i in plan.folded.operands]
        if self.is_bare:
            result = jax.ShapeDtypeStruct((problem.m, problem.n), self.function.out_avals[0].dtype)
            (out,) = call(problem, plan.choice, arrays, [result])
            return [out.reshape(self.shape)]
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


def _dequantizing(choice: selection.Choice) -> selection.Choice:
    """Return the choice of a bare product, with the reason where the weight is dequantized."""
    if choice.implementation != selection.XLA:
        return choice
    return dataclasses.replace(choice, why=f"the weight is dequantized: {choice.why}")


# With more rows than this, the mma.sync kernel computes a function of more instructions than that
# more slowly than XLA's loop does: gelu with a bias and a residual by 0.4 to 1.1 us on an H200, and
# gelu with a bias of experts by 1.1 to 3.5 us. A gate of experts is faster in the kernel, which
# stores neither accumulator: the clipped SwiGLU of gpt-oss by 2 to 12 us.
_FEW_ROWS, _FEW_ROWS_OF_EXPERTS, _LONG_FUNCTION = 16, 1, 30


def _is_slower(problem: PackedProblem, choice: selection.Choice) -> bool:
    """Return whether the fused kernel is slower than the product followed by XLA's loop."""
    if problem.form == "grouped" and problem.gated:
        return False
    uses_mma_sync = isinstance(parse_or_none(choice.config), PackedConfig)
    is_long = problem.function.cost.work > _LONG_FUNCTION
    few = _FEW_ROWS_OF_EXPERTS if problem.form == "grouped" else _FEW_ROWS
    return uses_mma_sync and is_long and problem.rows_of_weight > few


def _bare(product: Product) -> Folded | str:
    """The problem of a product without an epilogue, or why no implementation runs it."""
    dtype = product.function.out_avals[0].dtype
    if dtype not in DTYPE_NAMES:
        return f"no implementation makes {dtype}"
    return Folded(dataclasses.replace(product.problem, out_dtype=DTYPE_NAMES[dtype]), ())


@functools.lru_cache(maxsize=1024)
def _folded(product: Product) -> Folded | str:
    """The product as one problem, or what stands against it."""
    shape, levels = product.shape, product.levels
    if math.prod(shape) == 0:
        return "its result is empty"
    if math.prod(shape[product.num_row_dims :]) % TILE:
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
        return "the gate and up of a result are not its outermost column blocks"
    function, operands = placed
    is_grouped = product.problem.form == "grouped"
    if is_grouped and any(x.over in ("columns", "rows") for x in function.results):
        return "a result is a reduction, which XLA does"
    out_dtype = out_dtype_of(function)
    if out_dtype is None:
        return f"no implementation makes {function.results[0].dtype}"
    own = {"out_dtype": out_dtype, "gated": product.gated, "function": function}
    return Folded(dataclasses.replace(product.problem, **own), operands)


def weight(w: PackedWeight, dtype, plan: request.Plan) -> jax.Array:
    """Dequantize a weight as planned; return its transpose, (*stacked, tiles, 16, k)."""
    shape = (*w.values.shape[:-2], TILE, w.format.k)
    if plan.runs_by_xla:
        return jnp.swapaxes(stacked_dequantized(w, dtype), -1, -2).reshape(shape)
    arrays = [*(getattr(w, name) for name in w.format.shapes), *_table_of(w.format)]
    return call(plan.problem, plan.choice, arrays, [jax.ShapeDtypeStruct(shape, dtype)])[0]


def _table_of(form: PackedFormat) -> list[jax.Array]:
    """Return the operand that comes after the arrays of a weight, if there is one."""
    return [] if not form.has_lookup else [jnp.asarray(np.array(form.table, np.float32))]
