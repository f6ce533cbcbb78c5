"""Description of a GEMM, the mirror of csrc/core/problem.h.

D[b, m, n] = alpha * sum_k op(A)[b, m, k] * op(B)[b, k, n] + beta * C[b, m, n]

A and B may have block scales. epilogue.py describes the epilogue.
"""

import dataclasses
import math
from typing import ClassVar

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.epilogue import BARE, Epilogue
from jax_tcgemm.problem.function import Function, Numbers


@dataclasses.dataclass(frozen=True)
class Operand:
    """Input matrix with one entry for each batch index; strides count elements.

    A is (m, k) at `m * ld + k`, or `k * ld + m` when transposed; B is (k, n) at `k * ld + n`, or
    `n * ld + k` when transposed. Batch index `b` adds `b // batch_inner * outer_stride +
    b % batch_inner * inner_stride`; a stride of 0 broadcasts.
    """

    dtype: str
    transposed: bool
    ld: int
    outer_stride: int = 0
    inner_stride: int = 0

    @property
    def is_aligned(self) -> bool:
        """Whether every row is 16-byte aligned, in a buffer that is."""
        itemsize = DTYPES[self.dtype].itemsize
        strides = (self.ld, self.outer_stride, self.inner_stride)
        return all(stride * itemsize % 16 == 0 for stride in strides)


@dataclasses.dataclass(frozen=True)
class ScaleStrides:
    """Blocks and strides of an operand's float32 block scales; strides count elements.

    The scale for row r (m of A, n of B) and k is at ``r // rows * row_stride + k // depth *
    k_stride``, plus the offset of the batch index as in `Operand`.
    """

    rows: int
    depth: int
    row_stride: int
    k_stride: int
    outer_stride: int = 0
    inner_stride: int = 0

    def text(self, extents: tuple[int, int]) -> str:
        """Return the block shape as text, for an operand with `extents` = (rows, K)."""
        rows, k = extents
        return f"{min(self.rows, rows)}x{min(self.depth, k)}"


def numbers_of(scales: tuple[ScaleStrides, ScaleStrides] | None) -> Numbers:
    """Return blocks and strides of block scales as the FFI attribute `scales`."""
    return Numbers.of([number for x in scales or () for number in dataclasses.astuple(x)])


@dataclasses.dataclass(frozen=True)
class Problem:
    """Batched GEMM over flat buffers; D and C are packed (batch, m, n).

    D is (batch, m, 2, n) if its rows alternate with those of a second result. `symmetric` says that
    every D[b] equals its transpose, so that an implementation may compute half of D[b].
    """

    batch: int
    batch_inner: int
    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    out_dtype: str
    compute: str
    alpha: float = 1.0
    beta: float = 0.0
    epilogue: Epilogue = BARE
    scales: tuple[ScaleStrides, ScaleStrides] | None = None
    symmetric: bool = False

    kind: ClassVar[str] = "gemm"

    @property
    def d_shape(self) -> tuple[int, ...]:
        """Shape of D and C."""
        if self.function is None:
            return self.batch, self.m, self.n
        _, d, has_two = self.function.arrays[0]
        batch, rows, columns = d.shape(self.batch, self.m, self.n)
        return (batch, rows, *((2,) if has_two else ()), columns)

    @property
    def is_bare(self) -> bool:
        """Whether the product has no epilogue, alpha = 1 and beta = 0."""
        return self.epilogue == BARE and self.alpha == 1 and self.beta == 0

    @property
    def b_columns(self) -> int:
        """Number of columns of the operand b, which may hold both gate and up."""
        return self.n * (2 if self.epilogue.up_offset else 1)

    @property
    def is_packed(self) -> bool:
        """Whether A and B are packed: neither rows nor batch entries have gaps between them."""

        def packed(x: Operand, rows: int, columns: int) -> Operand:
            stride = rows * columns if self.batch > 1 else 0
            ld = rows if x.transposed else columns
            return Operand(x.dtype, x.transposed, ld, 0, stride)

        of_a, of_b = packed(self.a, self.m, self.k), packed(self.b, self.k, self.b_columns)
        return (self.batch_inner, self.a, self.b) == (self.batch, of_a, of_b)

    def with_rows(self, rows: int, *, are_columns: bool) -> "Problem":
        """Return an unbatched, packed problem with `rows` rows and the same other operand.

        `are_columns` says that the rows to change are columns of this problem, that is, its B. They
        become rows of the result, except where an epilogue or scaling depends on the orientation.
        """
        own, other, extent = self.a, self.b, self.n
        if are_columns:
            own, other, extent = self.b, self.a, self.m
        is_kn = other.transposed == are_columns
        keeps_columns = are_columns and not self.is_bare

        def packed(x, transposed, ld):
            return dataclasses.replace(
                x,
                transposed=transposed != keeps_columns,
                ld=max(ld, 1),
                outer_stride=0,
                inner_stride=0,
            )

        own = packed(own, False, self.k)
        other = packed(other, not is_kn, extent if is_kn else self.k)
        changed = {"batch": 1, "batch_inner": 1, "symmetric": False}
        if keeps_columns:
            return dataclasses.replace(self, **changed, n=rows, a=other, b=own)
        return dataclasses.replace(self, **changed, m=rows, n=extent, a=own, b=other)

    @property
    def function(self) -> Function | None:
        """Function of the epilogue, or None."""
        return self.epilogue.function

    @property
    def function_read_bytes(self) -> int:
        """Bytes that the epilogue function reads, accumulators excluded."""
        extents = {"kBoth": self.m * self.n, "kM": self.m, "kN": self.n, "kNothing": 1}
        function = self.epilogue.function
        return sum(
            itemsize
            * extents[strides.along]
            * (self.batch if strides.batch_outer or strides.batch_inner else 1)
            for _, itemsize, strides in (function.reads if function else ())
        )

    @property
    def function_result_bytes(self) -> int:
        """Bytes of the epilogue function's results other than D and a result beside D."""
        shape = self.batch, self.m, self.n
        arrays = self.function.arrays[1:] if self.function else ()
        sizes = (math.prod(x.shape(*shape)) * (2 if has_two else 1) for _, x, has_two in arrays)
        return sum(x.dtype.itemsize * size for (_, x, _), size in zip(arrays, sizes, strict=True))

    @property
    def num_b(self) -> int:
        """Number of matrices B of a batch entry: 2 for a gated GEMM, else 1."""
        return 2 if self.epilogue.gated else 1

    def attributes(self) -> dict:
        """Return the problem's fields of the FFI attribute `gemm` (csrc/core/problem.h)."""
        return {
            "compute": self.compute,
            "batch": self.batch,
            "batch_inner": self.batch_inner,
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "a_transposed": self.a.transposed,
            "b_transposed": self.b.transposed,
            "a_ld": self.a.ld,
            "a_outer_stride": self.a.outer_stride,
            "a_inner_stride": self.a.inner_stride,
            "b_ld": self.b.ld,
            "b_outer_stride": self.b.outer_stride,
            "b_inner_stride": self.b.inner_stride,
            "alpha": self.alpha,
            "beta": self.beta,
            "scales": numbers_of(self.scales),
            "symmetric": self.symmetric,
            **self.epilogue.attributes(),
        }

    def query(self) -> dict:
        """Return the problem as the modules' queries take it (csrc/modules/queries.h)."""
        dtypes = {
            "a_dtype": self.a.dtype,
            "b_dtype": self.b.dtype,
            "out_dtype": self.out_dtype,
        }
        return self.attributes() | dtypes

    @property
    def in_dtype(self) -> str:
        """Dtype of the operands."""
        return self.a.dtype

    @property
    def layout(self) -> str:
        """Layout "NN", "NT", "TN" or "TT": whether A and B are transposed."""
        return "NT"[self.a.transposed] + "NT"[self.b.transposed]

    @property
    def flops(self) -> int:
        """Number of real multiplications and additions: 2 for each real multiply-add.

        For a symmetric D, only elements on and below the diagonal count.
        """
        per_product = 8 if self.out_dtype in ("c64", "c128") else 2
        elements = self.m * (self.m + 1) // 2 if self.symmetric else self.m * self.n
        return per_product * self.batch * elements * self.num_b * self.k

    @property
    def bytes(self) -> int:
        """Least memory traffic in bytes: each array read or written once."""
        elements = math.prod(self.d_shape) * (2 if self.beta else 1)
        written = elements * DTYPES[self.out_dtype].itemsize
        of_function = self.function_read_bytes + self.function_result_bytes
        return self.a_bytes + self.b_bytes + written + of_function

    @property
    def a_bytes(self) -> int:
        """Bytes of the distinct elements of A."""
        return self._distinct(self.a, self.m * self.k)

    @property
    def b_bytes(self) -> int:
        """Bytes of the distinct elements of B, for a gated GEMM of gate and up."""
        return self._distinct(self.b, self.k * self.n * self.num_b)

    def _distinct(self, operand: Operand, elements: int) -> int:
        inner = self.batch_inner if operand.inner_stride else min(self.batch_inner, 1)
        outer = self.batch // max(self.batch_inner, 1)
        outer = outer if operand.outer_stride else min(outer, 1)
        return outer * inner * elements * DTYPES[operand.dtype].itemsize

    def __str__(self) -> str:
        if self.batch_inner not in (0, self.batch):
            batch = f"{self.batch // self.batch_inner}x{self.batch_inner} x "
        else:
            batch = f"{self.batch} x " if self.batch != 1 else ""
        inputs = self.a.dtype if self.a.dtype == self.b.dtype else f"{self.a.dtype},{self.b.dtype}"
        types = f"{inputs}->{self.out_dtype} ({self.compute})"
        epilogue = f" {self.epilogue}".rstrip()
        if self.scales:
            a, b = map(ScaleStrides.text, self.scales, ((self.m, self.k), (self.n, self.k)))
            epilogue = f" scaled {a} by {b}{epilogue}"
        if self.symmetric:
            epilogue = f" symmetric{epilogue}"
        return f"{batch}{self.m}x{self.n}x{self.k} {self.layout} {types}{epilogue}"
