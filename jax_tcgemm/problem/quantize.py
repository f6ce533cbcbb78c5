"""The one description of a rounding to 8 bits, as the C++ side knows it (core/quantize_problem.h).

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
    """An array's values of 8 bits and their scales, and those of its transpose.

    Attributes:
      form: "rows", "lines" of 1 by 128 and "blocks" of 128 by 128 say what has one scale; "scaled":
        each entry of the batch is given one.
      batch: entries.
      rows: of each.
      columns: of each.
      transposed: whether the transpose is quantized, too; not where form is "rows".
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
        """What everything is computed in."""
        return "f32"

    def attributes(self) -> dict:
        """What of the attribute `quantize` the problem determines."""
        return {k: v for k, v in dataclasses.asdict(self).items() if not k.endswith("_dtype")}

    def query(self) -> dict:
        """What the modules' quantize.reject() and quantize.workspace_bytes() take."""
        return dataclasses.asdict(self)

    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of the result, by the names that the C++ side has for them."""
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
        """Multiplications, and comparisons where scales are not given."""
        each = (1 + self.transposed) * (1 if self.form == "scaled" else 2)
        return each * self.batch * self.rows * self.columns

    @property
    def bytes(self) -> int:
        """Least memory traffic: everything once."""
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
    """What a problem with a scale for each tile is called; None where there is none of that.

    Args:
      shape: of the array, of two dimensions at least.
      tile: the extents of what has one scale.
    """
    *leading, down, across = tile
    if any(extent != 1 for extent in leading):
        return None
    if across == BLOCK and down in (1, BLOCK):
        return "lines" if down == 1 else "blocks"
    return "rows" if down == 1 and across == shape[-1] else None
