"""Description of a GEMM with weight-only quantization, the mirror of csrc/core/packed_problem.h.

product:  D[m,n] = sum over k of X[m,k] * w[k,n]
weight:   D[n,k] = w[k,n] = (u[k,n] - zero[k / group_size, n]) * scale[k / group_size, n]
          [* column_scale[n]]
grouped:  product of tokens sorted by expert, each token by its expert's weight; rows without an
          expert are 0 in every result

X of 8-bit floats has per-row scales, by which the accumulators are multiplied. An epilogue function
may compute D and further results from the accumulators. In a gated GEMM, the first half of the
weight's columns is the gate and the second half is up.
"""

import dataclasses
from typing import ClassVar

from jax_tcgemm.problem.dtypes import DTYPES, FLOAT8
from jax_tcgemm.problem.function import Function, attributes_of


@dataclasses.dataclass(frozen=True)
class PackedProblem:
    """Product with a packed weight (`problem.packed_weight`), or dequantization of that weight.

    Attributes:
      form: "product", "weight" or "grouped".
      m: rows of X and D; 0 in form "weight".
      n: columns of the weight, of one expert if grouped, with padding to whole tiles.
      k: rows of the weight, the contracted dimension.
      group_size: rows of the weight that share a scale; it divides k.
      bits: bits per element: 4 or 8.
      code: what the bits stand for: "integer", "table", or a float: "float4_e2m1fn",
        "float8_e4m3fn" or "float8_e5m2".
      zero: the zero of all integers without zero points; else 0.
      zero_points: whether each group and column has a zero of its own.
      scale: dtype of scales.
      in_dtype: dtype of X; in form "weight" the dtype of D.
      out_dtype: dtype of D.
      experts: number of weights of the call; 1 unless grouped.
      num_sizes: length of group_sizes, which counts all experts; 0 unless grouped.
      column_scales: whether each column has a float32 scale besides the block scales.
      gated: whether `function` takes two accumulators, gate and up; not in form "weight".
      function: epilogue function, or None; not in form "weight". Its inner batch level is the
        expert.
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
        """Compute type of the accumulators."""
        return "f32"

    def attributes(self) -> dict:
        """Return the problem's fields of the attribute `packed` (csrc/core/packed_problem.h)."""
        return {k: v for k, v in self.query().items() if not k.endswith("_dtype")}

    def query(self) -> dict:
        """Return the problem as the modules' packed.reject() and workspace_bytes() take it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["row_scales"] = self.row_scales
        return fields | attributes_of(fields.pop("function"))

    @property
    def row_scales(self) -> bool:
        """Whether X has per-row scales, as 8-bit floats have."""
        return DTYPES[self.in_dtype] in FLOAT8

    @property
    def rows_of_weight(self) -> int:
        """Rows of X for each weight, on average over all experts if grouped."""
        return self.m if self.form != "grouped" else -(-self.m // self.num_sizes)

    @property
    def weights_read(self) -> int:
        """The most weights that a call reads; weights of experts without tokens are not read."""
        return max(min(self.experts, self.m), 1) if self.form == "grouped" else 1

    @property
    def d_columns(self) -> int:
        """Number of columns of D."""
        return self.n // 2 if self.gated else self.n

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Least memory traffic in bytes: everything once; if grouped, `weights_read` weights."""
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
