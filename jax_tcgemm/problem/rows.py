"""Description of sums and dot products of indexed rows, the mirror of csrc/core/rows_problem.h.

sums:  D[t] = sum of weights[p] * A[indices[p]] over the pairs p of target t
dots:  D[p] = sum over n of A[indices[p], n] * B[b_indices[p], n]
"""

import dataclasses
from typing import ClassVar

from jax_tcgemm.problem.dtypes import DTYPES


@dataclasses.dataclass(frozen=True)
class RowsProblem:
    """Sums or dot products of indexed rows of packed, row-major matrices.

    Attributes:
      form: "sums" or "dots".
      a_rows: rows of A.
      b_rows: rows of B; 0 where form is "sums".
      targets: rows of D; 0 where form is "dots".
      pairs: length of the indices.
      n: columns.
      weighted: whether there are weights; form "sums" only.
      in_dtype: dtype of A and B, and of a sum's D.
    """

    form: str
    a_rows: int
    b_rows: int
    targets: int
    pairs: int
    n: int
    weighted: bool
    in_dtype: str

    kind: ClassVar[str] = "rows"

    @property
    def compute(self) -> str:
        """Compute type of accumulators; also the dtype of weights and of D in form "dots"."""
        return "f64" if self.in_dtype == "f64" else "f32"

    @property
    def out_dtype(self) -> str:
        """Dtype of D."""
        return self.in_dtype if self.form == "sums" else self.compute

    def attributes(self) -> dict:
        """Return the problem's fields of the FFI attribute `rows` (csrc/core/rows_problem.h)."""
        return {k: v for k, v in dataclasses.asdict(self).items() if not k.endswith("_dtype")}

    def query(self) -> dict:
        """Return the problem as the modules' rows.reject() and workspace_bytes() take it."""
        return dataclasses.asdict(self)

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.pairs * self.n

    @property
    def bytes(self) -> int:
        """Memory traffic in bytes: a row for each pair and operand, indices and weights, and D."""
        in_bytes, wide_bytes = DTYPES[self.in_dtype].itemsize, DTYPES[self.compute].itemsize
        if self.form == "dots":
            return self.pairs * (2 * self.n * in_bytes + 2 * 4 + wide_bytes)
        integers = 4 * (self.pairs + self.targets + 1)
        weights = self.pairs * wide_bytes if self.weighted else 0
        return (self.pairs + self.targets) * self.n * in_bytes + integers + weights

    def __str__(self) -> str:
        if self.form == "dots":
            return f"{self.pairs} products of rows of {self.n}, {self.in_dtype}"
        words = f"{self.targets} sums of {self.pairs} rows of {self.n}"
        return f"{words}{', weighted' if self.weighted else ''}, {self.in_dtype}"
