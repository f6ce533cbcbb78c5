"""The device-local product: fold the dimensions, choose, call.

`make_plan` decides everything from shapes and dtypes; `dot_general` carries a plan out and
`explain` prints one, so what is explained is what runs.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import selection
from jax_tcgemm.device import split_precision, xla_dot
from jax_tcgemm.device.call import call
from jax_tcgemm.device.folding import Fold, MatrixLayout, fold
from jax_tcgemm.device.plan import BasePlan
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES, DTYPES, wide_dtype
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.problem.operation import exchanges_operands
from jax_tcgemm.problem.precision import Numerics, for_xla, resolve
from jax_tcgemm.selection import xla_forms


@dataclasses.dataclass(frozen=True)
class Product:
    """transpose(dot_general(lhs, rhs), permutation) of given shapes: what a primitive call says.

    Attributes:
      options: options of the call.
      lhs_shape: extents of the left operand.
      lhs_dtype: its dtype.
      rhs_shape: extents of the right operand.
      rhs_dtype: its dtype.
      result_shape: extents of the result, permuted.
      result_dtype: its dtype.
      dimension_numbers: as of `lax.dot_general`.
      permutation: order of the result's dimensions.
      precision: as `precision.canonical_precision` returns it.
      symmetric: whether the matrices of the result are known to be symmetric, as of an array and
        its own transpose.
    """

    options: CallOptions
    lhs_shape: tuple[int, ...]
    lhs_dtype: np.dtype
    rhs_shape: tuple[int, ...]
    rhs_dtype: np.dtype
    result_shape: tuple[int, ...]
    result_dtype: np.dtype
    dimension_numbers: tuple
    permutation: tuple[int, ...]
    precision: object
    symmetric: bool = False

    def of_values(self, operands: Sequence) -> "Product":
        """Return the product of these operands: by its transpose an array makes a symmetric one."""
        lhs, rhs, *_ = operands
        return dataclasses.replace(self, symmetric=True) if lhs == rhs else self


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
            by = _split_of(product, numerics, name == "rhs")
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


def is_covered(product: Product, platform: str) -> bool:
    """Whether something else than XLA's own dot covers the dtypes and precision of a product."""
    numerics = resolve(
        product.lhs_dtype, product.rhs_dtype, product.result_dtype, product.precision, platform
    )
    return not isinstance(numerics, str)


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


def of_nominal_rows(problem: Problem, folded: Fold, options: CallOptions) -> Problem | None:
    """Return the problem with the rows of lhs that select a batch-invariant kernel, or None."""
    rows = options.invariant_rows
    return problem.with_rows(rows, are_columns=folded.swapped) if rows else None


def of_device(product, device: selection.Device):
    """A product with a precision, in float32 itself where that is faster than its terms.

    So it is on every CPU. What was asked for by name multiplies the terms there, too.
    """
    if device.platform != "cpu" or selection.is_forced(product.options):
        return product
    return dataclasses.replace(product, precision=for_xla(product.precision))


@functools.lru_cache(maxsize=4096)
def fold_product(
    product: Product, device: selection.Device
) -> tuple[Numerics, Fold, Problem] | str:
    """How a product is done as one matrix product, or why none of ours covers it."""
    dtypes = product.lhs_dtype, product.rhs_dtype, product.result_dtype
    numerics = resolve(*dtypes, product.precision, device.platform)
    if isinstance(numerics, str):
        return numerics
    numerics = _promoted(split_precision.split_on(device, numerics), product.options, device)
    dtypes = numerics.lhs_dtype, numerics.rhs_dtype
    layout = layout_of(product, numerics)
    folded = fold(
        layout.lhs_shape,
        layout.rhs_shape,
        layout.dimension_numbers,
        layout.permutation,
        (*(x.itemsize for x in dtypes), numerics.out_dtype.itemsize),
        layout.stored,
    )
    if isinstance(folded, str):
        return folded
    a_dtype, b_dtype = dtypes[::-1] if folded.swapped else dtypes
    problem = Problem(
        batch=folded.batch,
        batch_inner=folded.batch_inner,
        m=folded.m,
        n=folded.n,
        k=folded.k,
        a=_operand(folded.a, a_dtype),
        b=_operand(folded.b, b_dtype),
        out_dtype=DTYPE_NAMES[numerics.out_dtype],
        compute=numerics.compute,
    )
    is_told = product.symmetric and device.platform == "cuda"
    if is_told and _is_of_transposes(problem, folded, numerics):
        problem = dataclasses.replace(problem, symmetric=True)
    return numerics, folded, problem


# Rows of a symmetric result from which on half of it is worth computing alone.
LEAST_SYMMETRIC = 256


def _is_of_transposes(problem: Problem, folded: Fold, numerics: Numerics) -> bool:
    """Whether B lies as the transpose of A does, in large matrices of real numbers.

    Then, of a result that is known to be symmetric, the folded matrices are symmetric, too.
    """
    a, b = problem.a, problem.b
    is_complex = numerics.terms is not None and numerics.terms.is_complex
    return (
        problem.m == problem.n >= LEAST_SYMMETRIC
        and a == dataclasses.replace(b, transposed=not b.transposed)
        and folded.lhs_order == folded.rhs_order
        and folded.result_order is None
        and not is_complex
    )


def _promoted(numerics: Numerics, options: CallOptions, device: selection.Device) -> Numerics:
    """The same, promoting accumulators where that is asked for and wgmma may run the product."""
    asks = numerics.terms is not None and numerics.terms.promoted
    may_run = options.implementation in (None, "wgmma")
    if not (asks and may_run and device.compute_capability == 90):
        return numerics
    return dataclasses.replace(numerics, compute="f32_promoted")


def layout_of(product: Product, numerics: Numerics) -> split_precision.Layout:
    """Return the product that is folded: that of the operands, or of their terms."""
    return split_precision.layout(
        product.lhs_shape,
        product.rhs_shape,
        product.dimension_numbers,
        product.permutation,
        numerics,
    )


def _operand(layout: MatrixLayout, dtype: np.dtype) -> Operand:
    return Operand(
        DTYPE_NAMES[dtype],
        layout.transposed,
        layout.ld,
        layout.outer_stride,
        layout.inner_stride,
    )


def dot_general(lhs: jax.Array, rhs: jax.Array, plan: Plan, out_sharding=None) -> jax.Array:
    """Carries out a plan. `out_sharding` is that of the `LaxProduct`, for XLA's dot."""
    if plan.runs_by_xla:
        return _xla(lhs, rhs, plan, out_sharding)
    numerics, folded = plan.numerics, plan.fold
    lhs = prepare(lhs, plan.product, numerics, folded)
    rhs = prepare(rhs, plan.product, numerics, folded, is_rhs=True)
    a, b = (rhs, lhs) if folded.swapped else (lhs, rhs)
    d = local_gemm(plan.problem, a, b, choice=plan.choice, shape=folded.shape)
    if folded.result_order is not None:
        d = lax.transpose(d, folded.result_order)
    d = split_precision.with_components(
        d, layout_of(plan.product, numerics).component, plan.product.result_shape
    )
    return lax.convert_element_type(d, plan.product.result_dtype)


def prepare(
    x: jax.Array, product: Product, numerics: Numerics, folded: Fold, *, is_rhs: bool = False
) -> jax.Array:
    """An operand of a product in the dtype, or terms of it, and the order that it was folded in."""
    x = _of_dtype(x, product, numerics, is_rhs)
    order = folded.rhs_order if is_rhs else folded.lhs_order
    return x if order is None else lax.transpose(x, order)


def _of_dtype(x: jax.Array, product: Product, numerics: Numerics, is_rhs: bool) -> jax.Array:
    if numerics.terms is None:
        return lax.convert_element_type(x, numerics.rhs_dtype if is_rhs else numerics.lhs_dtype)
    return split_precision.split(x, _split_of(product, numerics, is_rhs))


def _split_of(product: Product, numerics: Numerics, is_rhs: bool) -> split_precision.Split:
    """How an operand is split, as `explain` says and `prepare` does it."""
    shape = product.rhs_shape if is_rhs else product.lhs_shape
    own = (axes[is_rhs] for axes in product.dimension_numbers)
    stored = layout_of(product, numerics).stored[is_rhs]
    return split_precision.Split(product.options, numerics, is_rhs, shape, *own, stored)


@dataclasses.dataclass(frozen=True)
class LaxProduct:
    """How XLA is asked for a product: as the transpose of a `lax.dot_general`.

    Attributes:
      exchanged: whether the right operand comes first.
      dimension_numbers: as of `lax.dot_general`.
      permutation: order of the result's dimensions.
      precision: as of `lax.dot_general`.
    """

    exchanged: bool
    dimension_numbers: tuple
    permutation: tuple[int, ...]
    precision: object

    @classmethod
    def of(cls, product: Product) -> "LaxProduct":
        """With the operands exchanged where the result then comes out in its order."""
        precision, permutation = for_xla(product.precision), product.permutation
        numbers, lhs_ndim = product.dimension_numbers, len(product.lhs_shape)
        # A DotAlgorithm is a tuple, too.
        can_exchange = precision is None or type(precision) is tuple
        if can_exchange and exchanges_operands(numbers, permutation, lhs_ndim):
            numbers = tuple(pair[::-1] for pair in numbers)
            identity = tuple(range(len(permutation)))
            return cls(True, numbers, identity, precision and precision[::-1])
        return cls(False, product.dimension_numbers, permutation, precision)


def _xla(lhs, rhs, plan, out_sharding):
    product, dtype = plan.product, plan.product.result_dtype
    if plan.has_terms:
        return _xla_of_terms(lhs, rhs, plan)
    match plan.choice.config:
        case xla_forms.BROADCAST:
            return _broadcast(lhs, rhs, plan)
        case xla_forms.BFLOAT16:
            lhs, rhs, dtype = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16), np.float32
        case xla_forms.INT32:
            lhs, rhs, dtype = lhs.astype(np.int32), rhs.astype(np.int32), np.int32
    asked = LaxProduct.of(product)
    precision = asked.precision
    is_preset = isinstance(precision, lax.DotAlgorithmPreset)
    if plan.platform == "cpu" and is_preset and plan.numerics is not None:
        # XLA:CPU refuses some presets. Converting as they say and multiplying in full precision
        # is at least as accurate, and lets a program written for the GPU run.
        lhs = lax.convert_element_type(lhs, plan.numerics.lhs_dtype)
        rhs = lax.convert_element_type(rhs, plan.numerics.rhs_dtype)
        precision, dtype = lax.Precision.HIGHEST, plan.numerics.out_dtype
    out = xla_dot.dot_general(
        *((rhs, lhs) if asked.exchanged else (lhs, rhs)),
        asked.dimension_numbers,
        platform=plan.platform,
        precision=precision,
        preferred_element_type=dtype,
        out_sharding=out_sharding,
    )
    if asked.permutation != tuple(range(out.ndim)):
        out = lax.transpose(out, asked.permutation)
    return lax.convert_element_type(out, product.result_dtype)


def _broadcast(lhs: jax.Array, rhs: jax.Array, plan: Plan) -> jax.Array:
    """The product as a sum over k of broadcast products."""
    product = plan.product
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = product.dimension_numbers
    dtype = wide_dtype(product.result_dtype)

    def last(x, contract, batch):
        """An operand of shape (*batch, *free, k), and its free extents."""
        free = [axis for axis in range(x.ndim) if axis not in (*contract, *batch)]
        shape = tuple(x.shape[axis] for axis in (*batch, *free))
        x = lax.transpose(x, (*batch, *free, *contract)).astype(dtype)
        return lax.reshape(x, (*shape, plan.problem.k)), shape[len(batch) :]

    lhs, rows = last(lhs, lhs_contract, lhs_batch)
    rhs, columns = last(rhs, rhs_contract, rhs_batch)
    num_batch, ndim = len(lhs_batch), len(product.result_shape)
    of_rows = tuple(range(num_batch + len(rows)))
    of_columns = (*range(num_batch), *range(num_batch + len(rows), ndim))
    shape = (*lhs.shape[:-1], *columns)

    def over(x, axes, *k):
        return lax.broadcast_in_dim(x, (*shape, *(x.shape[-1:] if k else ())), (*axes, *k))

    if xla_forms.is_reduction(plan.problem):
        out = jnp.sum(over(lhs, of_rows, ndim) * over(rhs, of_columns, ndim), -1, dtype=dtype)
    else:
        terms = (
            over(lhs[..., i], of_rows) * over(rhs[..., i], of_columns)
            for i in range(plan.problem.k)
        )
        out = functools.reduce(lax.add, terms)
    return lax.transpose(out, product.permutation).astype(product.result_dtype)


def _xla_of_terms(lhs, rhs, plan) -> jax.Array:
    """XLA's own product of the terms, in whichever order of its dimensions."""
    product, numerics = plan.product, plan.numerics
    layout, dtype = layout_of(product, numerics), numerics.out_dtype
    lhs = _of_dtype(lhs, product, numerics, is_rhs=False)
    rhs = _of_dtype(rhs, product, numerics, is_rhs=True)
    if plan.platform == "cpu":  # Where XLA has no products of batches of bfloat16 in float32.
        dtype = np.dtype(jnp.float32)
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    out = lax.dot_general(
        lhs,
        rhs,
        layout.dimension_numbers,
        precision=lax.Precision.DEFAULT,
        preferred_element_type=dtype,
    )
    out = split_precision.with_components(
        lax.transpose(out, layout.permutation), layout.component, product.result_shape
    )
    return lax.convert_element_type(out, product.result_dtype)


def local_gemm(
    problem: Problem,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array | None = None,
    *,
    in_place: bool = True,
    choice: selection.Choice,
    shape: tuple[int, ...] | None = None,
) -> jax.Array:
    """The custom call: D = alpha * op(A) op(B) + beta * C on flat row-major buffers.

    Args:
      problem: extents, strides, layouts and dtypes, without an epilogue; the arrays must have its
        dtypes.
      a: buffer of A, of any shape with the elements that the problem addresses.
      b: buffer of B, likewise.
      c: buffer of C, packed like D; needed unless `problem.beta` is 0, and then never read.
      in_place: whether D takes the place in memory of C: without a copy where that is not needed
        afterwards and, if it is the caller's, donated; XLA copies it first elsewhere.
      choice: what runs it; not "xla".
      shape: shape of D; the same elements as `problem.d_shape`, which is the default. A reshape
        after the call would keep XLA from letting another call's D take its place.

    Returns:
      D, of dtype `problem.out_dtype`, packed.

    Raises:
      ValueError: when C is missing.
    """
    if c is None and problem.beta != 0:
        raise ValueError(
            f"local_gemm: c must be given for beta={problem.beta}, got c=None; pass what beta is of"
        )
    shape = problem.d_shape if shape is None else shape
    result = jax.ShapeDtypeStruct(shape, DTYPES[problem.out_dtype])
    operands = [a, b] if c is None else [a, b, lax.reshape(c, shape)]
    aliases = {2: 0} if in_place and c is not None else None
    return call(problem, choice, operands, [result], aliases)[0]
