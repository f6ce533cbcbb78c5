"""Description of a grouped product, the mirror of csrc/core/ragged_problem.h.

The tokens are the rows of A, in groups of consecutive rows with device-resident `group_sizes`.

rows:         D[b, i, n] = sum_k A[b, i, k] * op(B)[b, g, k, n] for the rows i of group g, else 0
contraction:  D[b, g, m, n] = sum over the rows i of group g of A[b, i, m] * B[b, i, n]

In form "rows", an epilogue function may compute D and further results from the accumulators, of
which a gated GEMM has two, and from further operands. A may be gathered: token i is then
A[gather[i]]. Both operands may have block scales; in form "contraction" only with `tokens_last`.
"""

import dataclasses
from typing import ClassVar

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.function import Function, attributes_of
from jax_tcgemm.problem.gemm import ScaleStrides, numbers_of


@dataclasses.dataclass(frozen=True)
class RaggedProblem:
    """Grouped product over flat, packed, row-major buffers.

    Attributes:
      form: "rows" or "contraction".
      batch: number of independent products.
      m: rows of D; the tokens, in form "rows".
      n: columns of D.
      k: size of the contracted dimension; the tokens, in form "contraction".
      groups: groups of B ("rows") or of D ("contraction").
      num_sizes: length of group_sizes, of which `groups` from group_offset on are computed.
      b_transposed: whether B is (groups, n, k) instead of (groups, k, n), or gated (groups, 2, n,
        k); in form "rows".
      tokens_last: whether A is (m, k) and B is (n, k); in form "contraction".
      a_batched: whether A has an entry for each batch index, or one entry for all.
      b_batched: whether B has an entry for each batch index.
      sizes_batched: whether group_sizes and group_offset have an entry for each batch index.
      in_dtype: dtype of A and B.
      out_dtype: dtype of D.
      compute: compute type of the accumulators.
      gated: whether the GEMM is gated: B is (groups, k, 2, n), gate and up; with a function only.
      gathered: whether A is gathered, from `a_rows` rows.
      a_rows: rows of A if gathered, else 0.
      function: epilogue function, or None. Its outer batch level is the batch entry and its inner
        one the group. Its results are not reduced.
      scales: strides of the block scales of A and B, or None. Rows of A's scales are the tokens in
        form "rows", else m; rows of B's are n. The inner batch level of B's scales is the group, or
        in a gated GEMM each of a group's two matrices.
    """

    form: str
    batch: int
    m: int
    n: int
    k: int
    groups: int
    num_sizes: int
    b_transposed: bool
    a_batched: bool
    b_batched: bool
    sizes_batched: bool
    in_dtype: str
    out_dtype: str
    compute: str
    tokens_last: bool = False
    gated: bool = False
    gathered: bool = False
    a_rows: int = 0
    function: Function | None = None
    scales: tuple[ScaleStrides, ScaleStrides] | None = None

    kind: ClassVar[str] = "ragged"

    def attributes(self) -> dict:
        """Return the problem's fields of the attribute `ragged` (csrc/core/ragged_problem.h)."""
        return {k: v for k, v in self.query().items() if not k.endswith("_dtype")}

    def query(self) -> dict:
        """Return the problem as the modules' ragged.reject() and workspace_bytes() take it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["scales"] = numbers_of(self.scales)
        return fields | attributes_of(fields.pop("function"))

    @property
    def is_bare(self) -> bool:
        """Whether the product has no gather, epilogue function or block scales."""
        return not (self.gathered or self.function is not None or self.scales is not None)

    def with_rows(self, rows: int) -> "RaggedProblem":
        """Return the unbatched problem of one group with `rows` tokens."""
        changed = {"m": rows} if self.form == "rows" else {"k": rows}
        a_rows = rows if self.gathered else 0
        return dataclasses.replace(self, batch=1, groups=1, num_sizes=1, a_rows=a_rows, **changed)

    @property
    def tokens(self) -> int:
        """Number of tokens in all groups."""
        return self.m if self.form == "rows" else self.k

    @property
    def flops(self) -> int:
        """Real multiplications and additions if every token is in a group computed here."""
        per_product = 8 if self.out_dtype in ("c64", "c128") else 2
        return per_product * self.batch * self.m * self._b_columns * self.k

    @property
    def _b_columns(self) -> int:
        return 2 * self.n if self.gated else self.n

    @property
    def bytes(self) -> int:
        """Memory traffic in bytes if every group has tokens: each element of A, B and D once."""
        rows = self.form == "rows"
        a = (self.batch if self.a_batched else 1) * self.m * self.k
        b = (self.groups if rows else 1) * self.k * self._b_columns
        b *= self.batch if self.b_batched else 1
        d = self.batch * (1 if rows else self.groups) * self.m * self.n
        product = (a + b) * DTYPES[self.in_dtype].itemsize
        if self.function is None:
            return product + d * DTYPES[self.out_dtype].itemsize
        return product + self.function.bytes(self.batch, self.groups, self.m, self.n)

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch != 1 else ""
        layout = "" if self.form == "contraction" else " NT" if self.b_transposed else " NN"
        layout += " with tokens last" if self.tokens_last else ""
        types = f"{self.in_dtype}->{self.out_dtype} ({self.compute})"
        ragged = "m" if self.form == "rows" else "k"
        words = [f"{batch}{self.m}x{self.n}x{self.k}{layout}, {ragged} in {self.groups} groups"]
        if self.gathered:
            words.append(f"gathered from {self.a_rows} rows")
        if self.scales is not None:
            extents = (self.m, self.k), (self.n, self.k)
            words.append("scaled {} by {}".format(*map(ScaleStrides.text, self.scales, extents)))
        if self.gated:
            words.append("gated")
        if self.function is not None:
            words.append(self.function.name)
        return ", ".join([*words, types])
