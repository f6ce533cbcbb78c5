"""Description of a quantization to 8 bits, the mirror of csrc/core/quantize_problem.h.

scale = max(abs(X)) * (1 / largest number),  values = round(X * (1 / scale))
"""

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from jax_tcgemm.problem.dtypes import DTYPES

BLOCK = 128


@dataclasses.dataclass(frozen=True)
class QuantizeProblem:
    """Quantization of an array, and optionally of its transpose, to 8-bit values and scales.

    Attributes:
      form: the block of elements that share a scale: "rows", "lines" of 1 x 128, or "blocks" of
        128 x 128; or "scaled", where each batch entry has a given scale.
      batch: number of batch entries.
      rows: rows of each entry.
      columns: columns of each entry.
      transposed: whether the transpose is also quantized; not in form "rows".
      in_dtype: dtype of X.
      out_dtype: dtype of the values.
    """

    form: str
    batch: int
    rows: int
    columns: int
    transposed: bool
    in_dtype: str
    out_dtype: str

    kind: ClassVar[str] = "quantize"

    @property
    def compute(self) -> str:
        """Compute type of all arithmetic."""
        return "f32"

    def attributes(self) -> dict:
        """Return the problem's fields of the attribute `quantize`."""
        return {k: v for k, v in dataclasses.asdict(self).items() if not k.endswith("_dtype")}

    def query(self) -> dict:
        """Return the problem as the modules' quantize.reject() and workspace_bytes() take it."""
        return dataclasses.asdict(self)

    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the types of the result arrays, by their names on the C++ side."""
        found = self._results("", self.rows, self.columns)
        return found | (
            self._results("transposed_", self.columns, self.rows) if self.transposed else {}
        )

    def _results(self, prefix: str, rows: int, columns: int) -> dict[str, jax.ShapeDtypeStruct]:
        values = jax.ShapeDtypeStruct((self.batch, rows, columns), DTYPES[self.out_dtype])
        if self.form == "scaled":
            return {f"{prefix}values": values}
        down = -(-rows // BLOCK) if self.form == "blocks" else rows
        across = 1 if self.form == "rows" else -(-columns // BLOCK)
        scales = jax.ShapeDtypeStruct((self.batch, down, across), np.dtype(np.float32))
        return {f"{prefix}values": values, f"{prefix}scales": scales}

    @property
    def flops(self) -> int:
        """Number of multiplications, and of comparisons where scales are not given."""
        each = (1 + self.transposed) * (1 if self.form == "scaled" else 2)
        return each * self.batch * self.rows * self.columns

    @property
    def bytes(self) -> int:
        """Least memory traffic in bytes: everything once."""
        given = 4 * self.batch * (self.form == "scaled")
        x = self.batch * self.rows * self.columns * DTYPES[self.in_dtype].itemsize
        written = (r.size * r.dtype.itemsize for r in self.results().values())
        return x + given + sum(written)

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        words = f"{batch}{self.rows}x{self.columns} {self.in_dtype}->{self.out_dtype}"
        scales = {
            "rows": "scales of rows",
            "lines": f"scales of 1x{BLOCK}",
            "blocks": f"scales of {BLOCK}x{BLOCK}",
            "scaled": "by a scale",
        }[self.form]
        return f"{words} {scales}{' and transposed' if self.transposed else ''}"


def form_of(shape: tuple[int, ...], tile: tuple[int, ...]) -> str | None:
    """Return the form of a problem with one scale for each tile; None where no form has such tiles.

    Args:
      shape: shape of the array, with two dimensions at least.
      tile: shape of the block of elements that share a scale, with as many dimensions.
    """
    *leading, down, across = tile
    if any(extent != 1 for extent in leading):
        return None
    if across == BLOCK and down in (1, BLOCK):
        return "lines" if down == 1 else "blocks"
    return "rows" if down == 1 and across == shape[-1] else None
