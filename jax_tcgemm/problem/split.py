"""The one description of an operand's split into parts, as the C++ side knows it.

csrc/core/split_problem.h has the equations.
"""

import dataclasses
import math
from typing import ClassVar

import jax

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.function import Numbers


@dataclasses.dataclass(frozen=True)
class SplitProblem:
    """An array's parts, one after another, in rows that begin on 16 bytes.

    Attributes:
      form: "real", "left", "right" or "right_first": of which the last two have another dimension,
        of real and imaginary part of the result, after `middle` or before it.
      outer: extent of the dimensions before everything that is inserted.
      middle: of those after that, up to what is inserted next.
      inner: of the others but the last; 1 in the first two forms.
      columns: of the last dimension.
      depth: what the dimension after the parts, which is middle or inner, is filled up to by zeros.
      pitch: what the last dimension is filled up to by zeros.
      parts: which part each product takes, in the order in which they are added.
      in_dtype: dtype of the array.
      out_dtype: dtype of the parts.
    """

    form: str
    outer: int
    middle: int
    inner: int
    columns: int
    depth: int
    pitch: int
    parts: tuple[int, ...]
    in_dtype: str
    out_dtype: str

    kind: ClassVar[str] = "split"

    @property
    def compute(self) -> str:
        """What everything is computed in."""
        return "f32"

    def attributes(self) -> dict:
        """What of the attribute `split` the problem determines."""
        return {k: v for k, v in self.query().items() if not k.endswith("_dtype")}

    def query(self) -> dict:
        """What the modules' split.reject() and split.workspace_bytes() take."""
        return dataclasses.asdict(self) | {"parts": Numbers.of(self.parts)}

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the result, with each of the dimensions as one."""
        number = len(self.parts) * (1 if self.form == "real" else 2)
        if self.form == "right_first":
            return self.outer, 2, self.middle, number, self.depth, self.pitch
        component = (2, self.inner) if self.form == "right" else ()
        return (self.outer, number, self.depth, *component, self.pitch)

    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The array of the result."""
        return {"d": jax.ShapeDtypeStruct(self.shape, DTYPES[self.out_dtype])}

    @property
    def _elements(self) -> int:
        return self.outer * self.middle * self.inner * self.columns

    @property
    def flops(self) -> int:
        """Roundings and subtractions."""
        components = 1 if self.form == "real" else 2
        return 2 * components * (max(self.parts) + 1) * self._elements

    @property
    def bytes(self) -> int:
        """Least memory traffic: everything once."""
        written = math.prod(self.shape) * DTYPES[self.out_dtype].itemsize
        return self._elements * DTYPES[self.in_dtype].itemsize + written

    def __str__(self) -> str:
        extents = "x".join(str(x) for x in (self.outer, self.middle, self.inner) if x > 1)
        shape = f"{extents}x{self.columns}" if extents else str(self.columns)
        return f"{shape} {self.in_dtype} in {len(self.parts)} parts of {self.out_dtype}"
