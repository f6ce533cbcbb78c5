"""The one description of a product with a packed weight (core/packed_problem.h).

product:  D[m,n] = sum over k of X[m,k] * w[k,n]
weight:   D[n,k] = w[k,n] = (u[k,n] - zero[k / group_size, n]) * scale[k / group_size, n]
          [* column_scale[n]]
grouped:  a product of tokens sorted by expert, each by the weight of its own; 0 in rows of none, in
          every result

X of 8-bit floats has a scale for each row, which its sums are multiplied by. D and more results may
be what a function makes of a product, or, of a gated one, of its first half of columns and its
second.
"""

import dataclasses
from typing import ClassVar

from jax_tcgemm.problem.dtypes import DTYPES, FLOAT8
from jax_tcgemm.problem.function import Function, attributes_of


@dataclasses.dataclass(frozen=True)
class PackedProblem:
    """A product of rows and a packed weight (`problem.packed_weight`), or that weight.

    Attributes:
      form: "product", "weight" or "grouped".
      m: rows of X and D; 0 of a weight.
      n: columns, those that fill up the last tile included; of an expert.
      k: what is contracted.
      group_size: rows of the weight that share a scale; it divides k.
      bits: bits per element: 4 or 8.
      code: what the bits stand for: "integer", "table", or a float: "float4_e2m1fn",
        "float8_e4m3fn" or "float8_e5m2".
      zero: zero of all integers, if there are no zero points; else 0.
      zero_points: whether each group and column has a zero of its own.
      scale: dtype of scales.
      in_dtype: dtype of X; of a weight that of D.
      out_dtype: dtype of D.
      experts: weights that the call has; 1 unless grouped.
      num_sizes: length of group_sizes, of all experts there are; 0 unless grouped.
      column_scales: whether each column has a float32 scale beside the block scales.
      gated: the function is of both halves of the columns; of products only.
      function: what follows the product, of products only; None: nothing. Its inner batch level is
        the expert.
    """

    form: str
    m: int
    n: int
    k: int
    group_size: int
    bits: int
    code: str
    zero: int
    zero_points: bool
    scale: str
    in_dtype: str
    out_dtype: str
    experts: int = 1
    num_sizes: int = 0
    column_scales: bool = False
    gated: bool = False
    function: Function | None = None

    kind: ClassVar[str] = "packed"

    @property
    def compute(self) -> str:
        """The accumulator."""
        return "f32"

    def attributes(self) -> dict:
        """What of the attribute `packed` (csrc/core/packed_problem.h) the problem determines."""
        return {k: v for k, v in self.query().items() if not k.endswith("_dtype")}

    def query(self) -> dict:
        """What the modules' packed.reject() and packed.workspace_bytes() take."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["row_scales"] = self.row_scales
        return fields | attributes_of(fields.pop("function"))

    @property
    def row_scales(self) -> bool:
        """Whether each row of X has a factor: of 8-bit floats."""
        return DTYPES[self.in_dtype] in FLOAT8

    @property
    def rows_of_weight(self) -> int:
        """About how many rows each weight is multiplied by; that of experts nearly all are read."""
        return self.m if self.form != "grouped" else -(-self.m // self.num_sizes)

    @property
    def weights_read(self) -> int:
        """How many weights a call reads at most: experts without tokens are not read."""
        return max(min(self.experts, self.m), 1) if self.form == "grouped" else 1

    @property
    def d_columns(self) -> int:
        """Columns of D."""
        return self.n // 2 if self.gated else self.n

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Least memory traffic: everything once, of experts as many as can have tokens."""
        x, out = (DTYPES[dtype].itemsize for dtype in (self.in_dtype, self.out_dtype))
        of_group = DTYPES[self.scale].itemsize + 2 * self.zero_points
        of_column = self.k * self.bits // 8 + self.k // self.group_size * of_group
        weight = self.n * (of_column + 4 * self.column_scales)
        if self.form == "weight":
            return weight + self.n * self.k * out
        product = self.weights_read * weight + self.m * self.k * x
        if self.function is None:
            return product + self.m * self.n * out
        return product + self.function.bytes(1, self.experts, self.m, self.d_columns)

    def __str__(self) -> str:
        kinds = {"integer": f"int{self.bits}", "table": f"a table of {self.bits}"}
        kind = kinds.get(self.code, self.code)
        extras = ["zero points"] * self.zero_points + ["column scales"] * self.column_scales
        extras = f" with {' and '.join(extras)}" if extras else ""
        weight = f"{kind} in groups of {self.group_size}{extras}->{self.out_dtype}"
        if self.form == "weight":
            return f"{self.n}x{self.k} {weight}"
        shape = f"{self.m}x{self.n}x{self.k}"
        if self.form == "grouped":
            shape += f", m in {self.experts} groups"
        follows = " gated" * self.gated + (f" {self.function.name}" if self.function else "")
        return f"{shape} {self.in_dtype} by {weight}{follows}"
