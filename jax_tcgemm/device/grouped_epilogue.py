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
from jax_tcgemm.device.epilogue import carried, stored
from jax_tcgemm.device.fused import (
    Fusible,
    out_dtype_of,
    refuse_to_fuse,
    runs_on_cpu_by_xla,
    unfused,
)
from jax_tcgemm.device.levels import Levels, placed_function, strides_of
from jax_tcgemm.epilogues import InexpressibleError, emit
from jax_tcgemm.problem.block_scales import BlockScales
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.precision import Numerics
from jax_tcgemm.problem.ragged import RaggedProblem


@dataclasses.dataclass(frozen=True)
class Product:
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
        """That of an accumulator."""
        return (*self.product.batch_shape, self.product.m, self.product.n)

    @property
    def num_accumulators(self) -> int:
        """How many the function takes."""
        return 2 if self.product.gated else 1


@dataclasses.dataclass(frozen=True)
class Plan(Fusible):
    """How it runs on one device.

    `problem` and `numerics` are None where it can only be run unfused, for the reason in
    `choice.why`; so it is, too, where `choice.implementation` is "xla". `operands` are those of the
    function that the call takes, in their order there.
    """

    product: Product
    numerics: Numerics | None
    problem: RaggedProblem | None
    operands: tuple[int, ...]
    choice: selection.Choice

    @property
    def copies(self) -> tuple[str, ...]:
        """Every array that XLA must rewrite for the call."""
        return self.bare.copies

    @property
    def bare(self) -> grouped.Plan:
        """Of the product alone."""
        return grouped.Plan(self.product.product, self.numerics, self.problem, self.choice)


def make_plan(product: Product, device: selection.Device, obstacle: str = "") -> Plan:
    """Chooses what runs a grouped product with its epilogue.

    Args:
      product: the product.
      device: the device it will run on.
      obstacle: a phrase saying why it can only be run unfused; "" when it need not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run it.
    """
    bare = product.product
    options = bare.options
    if runs_on_cpu_by_xla(options, device):
        return _unfused(product, unfused(obstacle or "on the CPU XLA runs the function"))
    folded = obstacle or _folded(product, device)
    if isinstance(folded, str):
        return _unfused(product, refuse_to_fuse(options, device, "ragged", folded))
    nominal = grouped.of_nominal_rows(folded[1], options)
    choice = selection.select(options, folded[1], device, nominal=nominal)
    if choice.implementation == selection.XLA:
        choice = dataclasses.replace(choice, why=f"unfused: {choice.why}")
    return Plan(product, *folded, choice)


def _unfused(product: Product, choice: selection.Choice) -> Plan:
    return Plan(product, None, None, (), choice)


@functools.lru_cache(maxsize=1024)
def _folded(product: Product, device: selection.Device):
    """What a `Plan` has of it, or what stands against it."""
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
        a, b = (x.factors(own) for x, own in zip(product.scales, inner, strict=True))
        factors = dataclasses.replace(a, inner_stride=0), b
        problem = dataclasses.replace(problem, factors=factors)
    return numerics, problem, operands


def product_with_epilogue(plan: Plan, factors, scales, operands) -> list[jax.Array]:
    """Carries out a plan that is fused.

    Args:
      plan: the plan.
      factors: lhs, rhs, group_sizes, group_offset and gather or None.
      scales: of lhs and rhs, or none.
      operands: of the function.
    """
    product, function = plan.product, plan.problem.function
    given = grouped.prepared(plan.bare, *factors)
    given[4:4] = [x.folded(own) for x, own in zip(product.scales, scales, strict=True)]
    given += [stored(operands[i]) for i in plan.operands]
    dtypes = DTYPES[plan.problem.out_dtype], *(x.dtype for x in function.results[1:])
    results = [jax.ShapeDtypeStruct(product.shape, np.dtype(dtype)) for dtype in dtypes]
    found = call(plan.problem, plan.choice, given, results)
    found[0] = carried(found[0], function.results[0].dtype)
    types, ordered = product.function.out_avals, [None] * len(found)
    for x, number in zip(found, function.order, strict=True):
        ordered[number] = lax.convert_element_type(x, types[number].dtype)
    return ordered
