"""The one description of a product with a packed weight (core/packed_problem.h).

product:  D[m,n] = sum over k of X[m,k] * w[k,n]
weight:   D[n,k] = w[k,n] = (u[k,n] - zero[k / group_size, n]) * scale[k / group_size, n]
"""

import dataclasses
from typing import ClassVar

from jax_tcgemm.problem.dtypes import DTYPES


@dataclasses.dataclass(frozen=True)
class PackedProblem:
    """A product of rows and a packed weight (`problem.packed_weight`), or that weight.

    Attributes:
      form: "product" or "weight".
      m: rows of X and D; 0 of a weight.
      n: columns, those that fill up the last tile included.
      k: what is contracted.
      group_size: rows of the weight that share a scale; it divides k.
      bits: of an integer: 4 or 8.
      zero: of all, where there are no zero points; 0 of a table.
      zero_points: whether each group and column has a zero of its own.
      table: whether integers stand for the values of a table.
      scale: dtype of scales.
      in_dtype: dtype of X; of a weight that of D.
      out_dtype: dtype of D.
    """

    form: str
    m: int
    n: int
    k: int
    group_size: int
    bits: int
    zero: int
    zero_points: bool
    table: bool
    scale: str
    in_dtype: str
    out_dtype: str

    kind: ClassVar[str] = "packed"

    @property
    def compute(self) -> str:
        """The accumulator."""
        return "f32"

    def attributes(self) -> dict:
        """What of the attribute `packed` (csrc/core/packed_problem.h) the problem determines."""
        return {k: v for k, v in dataclasses.asdict(self).items() if not k.endswith("_dtype")}

    def query(self) -> dict:
        """What the modules' packed.reject() and packed.workspace_bytes() take."""
        return dataclasses.asdict(self)

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Least memory traffic: everything once."""
        x, out = (DTYPES[dtype].itemsize for dtype in (self.in_dtype, self.out_dtype))
        of_group = DTYPES[self.scale].itemsize + 2 * self.zero_points
        weight = self.n * (self.k * self.bits // 8 + self.k // self.group_size * of_group)
        if self.form == "weight":
            return weight + self.n * self.k * out
        return weight + self.m * (self.k * x + self.n * out)

    def __str__(self) -> str:
        kind = "a table of " if self.table else "int"
        zeros = " with zero points" if self.zero_points else ""
        weight = f"{kind}{self.bits} in groups of {self.group_size}{zeros}->{self.out_dtype}"
        if self.form == "weight":
            return f"{self.n}x{self.k} {weight}"
        return f"{self.m}x{self.n}x{self.k} {self.in_dtype} by {weight}"
