"""Description of the decomposition of an operand into split-precision terms.

The mirror of csrc/core/split_problem.h, which has the equations.
"""

import dataclasses
import math
from typing import ClassVar

import jax

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.function import Numbers


@dataclasses.dataclass(frozen=True)
class SplitProblem:
    """Decomposition of an array into terms, stored one after another in 16-byte-aligned rows.

    Attributes:
      form: "real", or for complex arrays "left", "right" or "right_first". The last two insert a
        dimension for real and imaginary part of the product's result, after or before `middle`.
      outer: size of the dimensions before all inserted ones.
      middle: size of the dimensions between the first inserted one and the next.
      inner: size of the remaining dimensions except the last one; 1 in forms "real" and "left".
      columns: size of the last dimension.
      depth: size to which the dimension after the terms (middle or inner) is padded with zeros.
      pitch: size to which the last dimension is padded with zeros.
      terms: the term that each product takes, in the order in which products are accumulated.
      in_dtype: dtype of the array.
      out_dtype: dtype of the terms.
    """

    form: str
    outer: int
    middle: int
    inner: int
    columns: int
    depth: int
    pitch: int
    terms: tuple[int, ...]
    in_dtype: str
    out_dtype: str

    kind: ClassVar[str] = "split"

    @property
    def compute(self) -> str:
        """Compute type of all arithmetic."""
        return "f32"

    def attributes(self) -> dict:
        """Return the problem's fields of the attribute `split`."""
        return {k: v for k, v in self.query().items() if not k.endswith("_dtype")}

    def query(self) -> dict:
        """Return the problem as the modules' split.reject() and workspace_bytes() take it."""
        return dataclasses.asdict(self) | {"terms": Numbers.of(self.terms)}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result, with each group of dimensions folded into one."""
        number = len(self.terms) * (1 if self.form == "real" else 2)
        if self.form == "right_first":
            return self.outer, 2, self.middle, number, self.depth, self.pitch
        component = (2, self.inner) if self.form == "right" else ()
        return (self.outer, number, self.depth, *component, self.pitch)

    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the type of the result array by its name on the C++ side."""
        return {"d": jax.ShapeDtypeStruct(self.shape, DTYPES[self.out_dtype])}

    @property
    def _elements(self) -> int:
        return self.outer * self.middle * self.inner * self.columns

    @property
    def flops(self) -> int:
        """Number of roundings and subtractions."""
        components = 1 if self.form == "real" else 2
        return 2 * components * (max(self.terms) + 1) * self._elements

    @property
    def bytes(self) -> int:
        """Least memory traffic in bytes: everything once."""
        written = math.prod(self.shape) * DTYPES[self.out_dtype].itemsize
        return self._elements * DTYPES[self.in_dtype].itemsize + written

    def __str__(self) -> str:
        extents = "x".join(str(x) for x in (self.outer, self.middle, self.inner) if x > 1)
        shape = f"{extents}x{self.columns}" if extents else str(self.columns)
        return f"{shape} {self.in_dtype} in {len(self.terms)} terms of {self.out_dtype}"
