"""The device-local product with a function as its epilogue: fold, say where operands lie, choose.

A factor and a residual alone are alpha and beta of the product, which libraries and the host have,
too. What no implementation runs as one call is run unfused: as a plain product, which is planned in
its own right, and what XLA makes of the function. The plan says why.
"""

import dataclasses
import functools
import math

import jax
from jax import lax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device.call import call
from jax_tcgemm.device.dense import call as dense_call
from jax_tcgemm.device.dense import plan as dense_plan
from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.dense.folding import Fold
from jax_tcgemm.device.dense.operands import prepare
from jax_tcgemm.device.fusion import fused
from jax_tcgemm.device.fusion.fused import FusibleProduct, Plan, out_dtype_of, unfused
from jax_tcgemm.device.fusion.levels import Levels, placed_function, strides_of
from jax_tcgemm.device.fusion.results import Made, stored
from jax_tcgemm.device.fusion.unfused_times import UnfusedTimes, unfused_times
from jax_tcgemm.epilogues import InexpressibleError, emit
from jax_tcgemm.epilogues.concatenation import split_concatenated_results
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.function import Function
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.layers import library_epilogue, scaling_of
from jax_tcgemm.problem.operands.block_scales import BlockScales
from jax_tcgemm.problem.precision import Numerics


@dataclasses.dataclass(frozen=True)
class Product(FusibleProduct):
    """A product of given shapes and its epilogue: what a primitive call says.

    Attributes:
      product: the product itself, in the dtype that it accumulates in.
      function: of the accumulators and the operands; results may be concatenations of two arrays.
      operand_shapes: theirs.
      num_rhs: how many right operands there are, with a product of each.
      pair: the dimension of the product that tells two accumulators apart, or None.
      in_place: the number of an operand in whose place in memory the first result is written, in
        which it lies like that; XLA copies it first where it is needed afterwards. None: no such.
      scales: those of blocks of both operands, which follow these; or None. Of a gated product
        those of one of its matrices.
      symmetric: whether the function is known to make symmetric matrices of a symmetric product.
    """

    kind = "gemm"

    product: dense.Product
    function: core.ClosedJaxpr
    operand_shapes: tuple[tuple[int, ...], ...] = ()
    num_rhs: int = 1
    pair: int | None = None
    in_place: int | None = None
    scales: tuple[BlockScales, BlockScales] | None = None
    symmetric: bool = False

    @property
    def options(self) -> CallOptions:
        """Options of the call."""
        return self.product.options

    def of_values(self, operands):
        """Recognize the product of an array and its own transpose."""
        if self.num_accumulators != 1:
            return self
        return dataclasses.replace(self, product=self.product.of_values(operands))

    @property
    def num_accumulators(self) -> int:
        """How many the function takes."""
        return self.num_rhs if self.pair is None else 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an accumulator."""
        shape, pair = self.product.result_shape, self.pair
        return shape if pair is None else (*shape[:pair], *shape[pair + 1 :])

    def on_device(self, device: selection.Device) -> "Product":
        """Return the product with the precision of the device."""
        return dataclasses.replace(self, product=dense.of_device(self.product, device))

    def plan(self, device: selection.Device, obstacle: str) -> Plan:
        """Return the plan with alpha and beta or with the function in the kernel."""
        scaled = None if obstacle else _scaled_plan(self, device)
        is_scaling = device.platform != "cuda" or self.options.implementation in _SCALING
        if scaled is not None and is_scaling:
            return scaled
        found = super().plan(device, obstacle)
        if scaled is None or selection.is_forced(self.options):
            return found
        times = [selection.predicted_us(x.problem, device) for x in (scaled, found) if x.is_fused]
        is_faster = None not in times and times and times[0] == min(times)
        return scaled if scaled.is_fused and (is_faster or not found.is_fused) else found

    def folded(self, device: selection.Device) -> "Folded | str":
        """Return the problem with the function in its epilogue, or why there is none."""
        return _folded(self, device)

    def select(self, folded: "Folded", device: selection.Device) -> selection.Choice:
        """Select what runs the product, unfused where the cost model predicts less for that."""
        compared = ""
        # With block scales, XLA multiplies operands that are dequantized first. Batch-invariant
        # calls need one implementation of the epilogue for any number of rows.
        if not selection.is_forced(self.options) and self.scales is None:
            gains, compared = _compared(self, folded, device)
            if not gains:
                return unfused(compared)
        nominal = dense.of_nominal_rows(folded.problem, folded.fold, self.options)
        choice = selection.select(self.options, folded.problem, device, nominal=nominal)
        if compared:
            choice = dataclasses.replace(choice, why=f"{choice.why}; {compared}")
        return choice

    def copies(self, plan: Plan) -> tuple[str, ...]:
        """Return those of the product."""
        return dense_plan.copies(self.product, plan.folded.numerics, plan.folded.fold)

    def xla_us(self, plan: Plan, device: selection.Device) -> float | None:
        """Return the estimated time of XLA's products and its loop."""
        if self.scales is not None or device.platform != "cuda":
            return None
        if plan.folded.levels is None:
            return super().xla_us(plan, device)
        apart = _apart(self, plan.folded, device)
        return apart and apart.xla_us

    def run(self, plan: Plan, *arguments: jax.Array) -> list[jax.Array]:
        """Return the results' arrays, in the order of the first of each."""
        return (_scaled if plan.folded.levels is None else _with_function)(plan, *arguments)


@dataclasses.dataclass(frozen=True)
class Folded(fused.Folded):
    """A product with its epilogue as one matrix product.

    Attributes:
      problem: the problem.
      numerics: how it is computed.
      fold: how the product is folded.
      operands: those of the function that the call takes, in their order there.
      levels: what the result's dimensions are in the problem; None where the epilogue is alpha and
        beta of that.
    """

    problem: Problem
    numerics: Numerics
    fold: Fold
    operands: tuple[int, ...]
    levels: Levels | None


# Implementations with alpha and beta, and without epilogues, or with few.
_SCALING = ("cublaslt", "simt_naive", "simt_tiled")


def _scaled_plan(product: Product, device: selection.Device) -> Plan | None:
    """The plan with alpha and beta; None where the epilogue is more than that."""
    bare, scaling = product.product, scaling_of(product.function, product.num_accumulators)
    if scaling is None or product.scales is not None or math.prod(bare.result_shape) == 0:
        return None
    bare = dataclasses.replace(bare, result_dtype=scaling.dtype)
    folded = dense.fold_product(bare, device)
    if isinstance(folded, str):
        return None
    if device.platform == "cpu" and bare.options.invariant_rows:
        return None  # `host` adds up a single row in another order, unless it repeats the row.
    numerics, fold, problem = folded
    if numerics.out_dtype != bare.result_dtype or fold.result_order is not None:
        return None
    if problem.out_dtype not in _FLOATS:
        return None
    operands = () if scaling.residual is None else (scaling.residual,)
    problem = dataclasses.replace(problem, alpha=scaling.alpha, beta=float(len(operands)))
    # No kernel computes half of a result and scales it without a function.
    problem = dataclasses.replace(problem, symmetric=problem.symmetric and problem.is_bare)
    nominal = dense.of_nominal_rows(problem, fold, bare.options)
    choice = selection.select(bare.options, problem, device, nominal=nominal)
    product = dataclasses.replace(product, product=bare)
    return Plan(product, Folded(problem, numerics, fold, operands, None), choice)


_FLOATS = ("f16", "bf16", "f32", "f64")


def _compared(product: Product, folded: Folded, device: selection.Device) -> tuple[bool, str]:
    """Whether one call is worth it, and the times that say so; where none are known it is.

    It is where

        t(products with function) < t(bare products) + t(loop)

    by the cost model, as `unfused_times` has the right side.
    """
    apart, one_us = _apart(product, folded, device), selection.predicted_us(folded.problem, device)
    if apart is None or one_us is None:
        return True, ""
    if one_us < apart.product_us + apart.loop_us:
        return True, f"apart they would take {apart}"
    return False, f"the cost model predicts {one_us:.4g} us for one call, {apart}"


def _apart(product: Product, folded: Folded, device: selection.Device) -> UnfusedTimes | None:
    numbers, own = (product.num_accumulators, product.num_rhs), (folded.operands, folded.problem)
    return unfused_times(product.product, product.function, *numbers, *own, device)


@functools.lru_cache(maxsize=1024)
def _folded(product: Product, device: selection.Device) -> Folded | str:
    """The product as one problem, or what stands against it."""
    one, alternate = _one_of_stacked(product), False
    if one is None and (one := _one_of_alternating(product)) is not None:
        alternate = True
    folded = dense.fold_product(one or product.product, device)
    if isinstance(folded, str):
        return folded
    numerics, fold, problem = folded
    if one is not None and fold.rhs_order is not None:
        return "the weights of gate and up must be permuted"
    if numerics.out_dtype != product.product.result_dtype:
        return f"no implementation gives {product.product.result_dtype} to a function"
    if fold.result_order is not None:
        return "its result must be permuted"
    if product.scales is not None and (problem.m, problem.n) != tuple(
        math.prod(x.operand_shape[x.num_batch : -1]) for x in product.scales
    ):
        return "rows that scales are of must be those of a matrix"
    if math.prod(product.product.result_shape) == 0:
        return "its result is empty"
    function, beside, dimensions = split_concatenated_results(product.function)
    try:
        source, _ = emit(function, product.num_accumulators)
    except InexpressibleError as error:
        return str(error)
    if product.num_accumulators == 2:
        if alternate:
            problem = _alternating(numerics, fold, problem)
        else:
            problem = _gated(product, numerics, fold, problem, one)
        if isinstance(problem, str):
            return problem
    shape = product.shape
    for levels in Levels.all_of(problem, shape):
        strides = strides_of(source, product.operand_shapes, levels, shape)
        placed = placed_function(source, shape, levels, strides, beside)
        if not isinstance(placed, str):
            break
    else:
        return placed
    if not all(map(levels.are_rows_from, dimensions)):
        return "the gate and up of a result are not its outermost column blocks"
    function, operands = placed
    library = library_epilogue(source, shape) if product.num_accumulators == 1 else "none"
    function = dataclasses.replace(function, library=library)
    problem = _in_levels(problem, math.prod(shape[axis] for axis in levels.inner))
    if product.scales is not None:
        scales = tuple(x.scale_strides(problem.batch_inner) for x in product.scales)
        problem = dataclasses.replace(problem, scales=scales)
    out_dtype = out_dtype_of(function)
    if out_dtype is None:
        return f"no implementation makes {function.results[0].dtype}"
    epilogue = dataclasses.replace(problem.epilogue, function=function)
    problem = dataclasses.replace(problem, out_dtype=out_dtype, epilogue=epilogue)
    symmetric = problem.symmetric and _keeps_symmetry(product, function)
    problem = dataclasses.replace(problem, symmetric=symmetric)
    return Folded(problem, numerics, fold, operands, levels)


def _keeps_symmetry(product: Product, function: Function) -> bool:
    """Whether a function makes one symmetric matrix of another."""
    is_plain = product.num_accumulators == 1 and product.scales is None
    is_one = len(function.results) == 1 and not function.results[0].over
    of_numbers = all(strides.along == "kNothing" for _, _, strides in function.reads)
    return is_plain and is_one and (product.symmetric or (of_numbers and not function.indices))


def _one_of_stacked(product: Product) -> dense.Product | None:
    """The product with the first one of two matrices of weights that one array has one by one."""
    bare, pair = product.product, product.pair
    if pair is None:
        return None
    contract, batch = bare.dimension_numbers
    natural = bare.permutation[pair]
    if natural != len(bare.lhs_shape) - len(contract[0]) or 0 in (*contract[1], *batch[1]):
        return None
    numbers = ((own[0], tuple(axis - 1 for axis in own[1])) for own in (contract, batch))
    order = tuple(axis - (axis > natural) for axis in bare.permutation if axis != natural)
    return dataclasses.replace(
        bare,
        rhs_shape=bare.rhs_shape[1:],
        result_shape=product.shape,
        dimension_numbers=tuple(numbers),
        permutation=order,
    )


def _one_of_alternating(product: Product) -> dense.Product | None:
    """The product with every other column of weights, each of which is a stretch of memory."""
    bare, pair = product.product, product.pair
    if pair is None or bare.permutation[pair] != len(bare.permutation) - 1:
        return None
    contract, _ = bare.dimension_numbers
    axis = len(bare.rhs_shape) - len(contract[1]) - 1
    if sorted(contract[1]) != list(range(axis + 1, len(bare.rhs_shape))):
        return None
    numbers = (contract[0], tuple(x - 1 for x in contract[1])), bare.dimension_numbers[1]
    order = tuple(x for x in bare.permutation if x != len(bare.permutation) - 1)
    return dataclasses.replace(
        bare,
        rhs_shape=(*bare.rhs_shape[:axis], *bare.rhs_shape[axis + 1 :]),
        result_shape=product.shape,
        dimension_numbers=numbers,
        permutation=order,
    )


def _alternating(numerics: Numerics, fold: Fold, problem: Problem) -> Problem | str:
    """The problem with two matrices B whose columns alternate, of that with one of them alone."""
    b = problem.b
    if fold.swapped or numerics.terms is not None or not b.transposed or b.ld != problem.k:
        return "columns of gate and up alternate"
    strides = b.ld, b.outer_stride, b.inner_stride
    ld, outer, inner = (2 * stride for stride in strides)
    b = dataclasses.replace(b, ld=ld, outer_stride=outer, inner_stride=inner)
    return dataclasses.replace(problem, b=b, epilogue=Epilogue(gated=True, up_offset=problem.k))


def _gated(
    product: Product, numerics: Numerics, fold: Fold, problem: Problem, one: dense.Product | None
) -> Problem | str:
    """The problem with two matrices B, of which it is that of `one` if that is not None."""
    obstacle = "gate and up are not the outermost columns of the result"
    if fold.swapped:
        return obstacle
    if product.pair is None:
        return dataclasses.replace(problem, epilogue=Epilogue(gated=True))
    if one is not None:
        _, rhs_stored = dense.layout_of(one, numerics).stored
        gated = Epilogue(gated=True, up_offset=math.prod(rhs_stored))
        return dataclasses.replace(problem, epilogue=gated)
    if math.prod(product.product.result_shape[product.pair :]) != fold.n:
        return obstacle
    n = fold.n // 2
    up_offset = n * (problem.b.ld if problem.b.transposed else 1)
    return dataclasses.replace(problem, n=n, epilogue=Epilogue(gated=True, up_offset=up_offset))


def _in_levels(problem: Problem, batch_inner: int) -> Problem:
    """The same, with the batch's one level as two."""
    if batch_inner == problem.batch_inner:
        return problem
    a, b = (
        dataclasses.replace(x, outer_stride=x.inner_stride * batch_inner)
        for x in (problem.a, problem.b)
    )
    return dataclasses.replace(problem, batch_inner=batch_inner, a=a, b=b)


def _with_function(plan: Plan, lhs, *others) -> list[jax.Array]:
    """Carries out the call with a function in the kernel."""
    folded, function = plan.folded, plan.problem.epilogue.function
    numerics, fold = folded.numerics, folded.fold
    rights, operands = others[: plan.product.num_rhs], others[plan.product.num_rhs :]
    bare = plan.product.product
    arrays = [
        prepare(lhs, bare, numerics, fold),
        *(prepare(x, bare, numerics, fold, is_rhs=True) for x in rights),
    ]
    if fold.swapped:
        arrays.reverse()
    if plan.product.scales is not None:
        of_blocks, operands = operands[:2], operands[2:]
        for x, own in zip(plan.product.scales, of_blocks, strict=True):
            # The scales of gate, then those of up, in a gated product.
            has_two = own.ndim > len(x.shape)
            arrays.append((jax.vmap(x.folded) if has_two else x.folded)(own))
    product = plan.product
    extents = plan.problem.batch, plan.problem.m, plan.problem.n
    made = Made(function, product.function, product.shape, extents, folded.levels)
    results = made.arrays(plan.problem.out_dtype)
    given = [stored(operands[i]) for i in folded.operands]
    aliases = None
    # cuBLASLt does not promise to read an operand before it writes.
    may_alias = plan.choice.implementation != "cublaslt" and function.order[0] == 0
    may_alias &= not function.results[0].over
    if may_alias and product.in_place in folded.operands:
        place = folded.operands.index(product.in_place)
        own, d = given[place], results[0]
        if own.dtype == d.dtype and own.size == math.prod(d.shape):
            given[place] = lax.reshape(own, d.shape)
            aliases = {len(arrays) + place: 0}
    return made.results(call(plan.problem, plan.choice, (*arrays, *given), results, aliases))


def _scaled(plan: Plan, lhs, rhs, *operands) -> list[jax.Array]:
    """Carries out the call with alpha and beta."""
    product, own = plan.product.product, plan.folded
    numerics, fold = own.numerics, own.fold
    a = prepare(lhs, product, numerics, fold)
    b = prepare(rhs, product, numerics, fold, is_rhs=True)
    a, b = (b, a) if fold.swapped else (a, b)
    residual = operands[own.operands[0]].astype(numerics.out_dtype) if own.operands else None
    out = dense_call.local_gemm(
        plan.problem,
        a,
        b,
        residual,
        in_place=plan.product.in_place in own.operands,
        choice=plan.choice,
        shape=product.result_shape,
    )
    return [out]
