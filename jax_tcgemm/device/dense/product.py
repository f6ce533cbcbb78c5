"""Dense products on one device, and the problems to which the products fold."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jax_tcgemm import selection
from jax_tcgemm.device import split_precision
from jax_tcgemm.device.dense.folding import Fold, MatrixLayout, fold
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.problem.precision import Numerics, for_xla, resolve


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


def is_covered(product: Product, platform: str) -> bool:
    """Whether something else than XLA's own dot covers the dtypes and precision of a product."""
    numerics = resolve(
        product.lhs_dtype, product.rhs_dtype, product.result_dtype, product.precision, platform
    )
    return not isinstance(numerics, str)


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


def split_of(product: Product, numerics: Numerics, is_rhs: bool) -> split_precision.Split:
    """How an operand is split, as `explain` says and `prepare` does it."""
    shape = product.rhs_shape if is_rhs else product.lhs_shape
    own = (axes[is_rhs] for axes in product.dimension_numbers)
    stored = layout_of(product, numerics).stored[is_rhs]
    return split_precision.Split(product.options, numerics, is_rhs, shape, *own, stored)
