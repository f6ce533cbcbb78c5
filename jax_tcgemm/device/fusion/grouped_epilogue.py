"""The device-local grouped product with a function as its epilogue, as epilogue.py has dense ones.

Rows are counted over all groups; an operand with a value for each group has a stride along these.
"""

import dataclasses
import functools
import math

import jax
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import grouped
from jax_tcgemm.device.call import call
from jax_tcgemm.device.fusion import fused
from jax_tcgemm.device.fusion.fused import FusibleProduct, Plan, out_dtype_of
from jax_tcgemm.device.fusion.levels import Levels, placed_function, strides_of
from jax_tcgemm.device.fusion.results import carried, stored
from jax_tcgemm.epilogues import InexpressibleError, emit
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.operands.block_scales import BlockScales
from jax_tcgemm.problem.precision import Numerics
from jax_tcgemm.problem.ragged import RaggedProblem


class GroupedProduct(FusibleProduct):
    """A grouped product that may be fused.

    Attributes:
      product: the product itself.
    """

    kind = "ragged"

    product: grouped.Product

    @property
    def options(self) -> CallOptions:
        """Options of the call."""
        return self.product.options

    def of_nominal_rows(self, folded: "Folded") -> RaggedProblem | None:
        """Return the problem with as many rows as select a batch-invariant kernel, or None."""
        return grouped.of_nominal_rows(folded.problem, self.options)

    def copies(self, plan: Plan) -> tuple[str, ...]:
        """Return those of the product."""
        return self.bare(plan).copies

    def bare(self, plan: Plan) -> grouped.Plan:
        """Return a plan with only the product."""
        return grouped.Plan(self.product, plan.folded.numerics, plan.problem, plan.choice)


@dataclasses.dataclass(frozen=True)
class Product(GroupedProduct):
    """A grouped product of form rows and its epilogue: what a primitive call says.

    Attributes:
      product: the product itself, in the dtype that it accumulates in; gated: both.
      function: of the accumulators and the operands, of those by group for each row its group's.
      operand_shapes: theirs as they are held.
      by_group: for each operand, whether it is held by group, as (*batch, groups, 1, columns).
      scales: of lhs, and of rhs as (*batch, groups, n, k), of a gated product (*batch, groups, 2,
        n, k); or none.
    """

    product: grouped.Product
    function: core.ClosedJaxpr
    operand_shapes: tuple[tuple[int, ...], ...]
    by_group: tuple[bool, ...]
    scales: tuple[BlockScales, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an accumulator."""
        return (*self.product.batch_shape, self.product.m, self.product.n)

    @property
    def num_accumulators(self) -> int:
        """How many the function takes."""
        return 2 if self.product.gated else 1

    def folded(self, device: selection.Device) -> "Folded | str":
        """Return the problem with the function in its epilogue, or why there is none."""
        return _folded(self, device)

    def run(self, plan: Plan, *arguments: jax.Array) -> list[jax.Array]:
        """Return the function's results.

        Args:
          plan: the plan.
          *arguments: lhs, rhs, group_sizes, group_offset, gather if any, scales of lhs and rhs if
            any, and the function's operands.
        """
        number = len(arguments) - len(self.operand_shapes)
        num_operands, operands = number - len(self.scales), arguments[number:]
        scales, function = arguments[num_operands:number], plan.problem.function
        given = grouped.prepared(self.bare(plan), *arguments[:num_operands])
        given[4:4] = [x.folded(own) for x, own in zip(self.scales, scales, strict=True)]
        given += [stored(operands[i]) for i in plan.folded.operands]
        dtypes = DTYPES[plan.problem.out_dtype], *(x.dtype for x in function.results[1:])
        results = [jax.ShapeDtypeStruct(self.shape, np.dtype(dtype)) for dtype in dtypes]
        found = call(plan.problem, plan.choice, given, results)
        found[0] = carried(found[0], function.results[0].dtype)
        types, ordered = self.function.out_avals, [None] * len(found)
        for x, number in zip(found, function.order, strict=True):
            ordered[number] = lax.convert_element_type(x, types[number].dtype)
        return ordered


@dataclasses.dataclass(frozen=True)
class Folded(fused.Folded):
    """A grouped product and what is fused with it as one problem.

    Attributes:
      problem: the problem.
      numerics: how it is computed.
      operands: those of the function that the call takes, in their order there.
    """

    problem: RaggedProblem
    numerics: Numerics
    operands: tuple[int, ...] = ()


@functools.lru_cache(maxsize=1024)
def _folded(product: Product, device: selection.Device) -> Folded | str:
    """The product as one problem, or what stands against it."""
    bare = product.product
    numerics = grouped.numerics_of(bare, device)
    if isinstance(numerics, str):
        return numerics
    if numerics.out_dtype != bare.result_dtype:
        return f"no implementation gives {bare.result_dtype} to a function"
    shape = product.shape
    if math.prod(shape) == 0:
        return "its result is empty"
    try:
        source, _ = emit(product.function, product.num_accumulators)
    except InexpressibleError as error:
        return str(error)
    *batch, m, n = (() if extent == 1 else (axis,) for axis, extent in enumerate(shape))
    levels = Levels(sum(batch, ()), (), m, n)
    strides = strides_of(source, product.operand_shapes, levels, shape, product.by_group)
    placed = placed_function(source, shape, levels, strides)
    if isinstance(placed, str):
        return placed
    function, operands = placed
    if any(result.over for result in function.results):
        return "a result is a reduction, which XLA does"
    out_dtype = out_dtype_of(function)
    if out_dtype is None:
        return f"no implementation makes {function.results[0].dtype}"
    problem = grouped.problem_of(bare, numerics, device.platform)
    problem = dataclasses.replace(problem, out_dtype=out_dtype, function=function)
    if product.scales:
        inner = 1, product.num_accumulators * bare.groups
        a, b = (x.scale_strides(own) for x, own in zip(product.scales, inner, strict=True))
        scales = dataclasses.replace(a, inner_stride=0), b
        problem = dataclasses.replace(problem, scales=scales)
    return Folded(problem, numerics, operands)
