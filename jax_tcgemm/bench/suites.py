"""Benchmark suites: named lists of matrix products, kept as TOML files in ``data/suites``.

A suite file holds::

    description = "what the shapes are and who asks for them"
    dtypes = ["bf16"]                  # the ones measured unless --dtype says otherwise
    groups = [
      {name = "...", m = 4096, n = [1024, 2048], k = 512, batch = 1, layout = "NN"},
      {name = "...", size = [128, 256]},    # m = n = k
    ]

Each of m, n, k, batch and layout may be a list; a group is their Cartesian product. Shapes are
always said as M, N, K: the product is (M, K) x (K, N) -> (M, N), whatever the layout in memory.
A file with ``workload = "NAME"`` holds groups that the module of this name in workloads/ reads,
such as "packed.layers"; see workload.py.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import tomllib
from collections.abc import Iterable
from importlib import resources

import jax
from jax import lax

from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed

# First letter: A is stored (M, K) for N and (K, M) for T; second: B is (K, N) for N, (N, K) for T.
LAYOUTS = ("NN", "NT", "TN", "TT")

# How a suite's dtype name is asked of JAX: element type of both operands, precision and the
# result's element type (None: that of the operands).
DTYPES = {
    "bf16": ("bfloat16", "default", None),
    "f16": ("float16", "default", None),
    "f32": ("float32", "highest", None),
    "tf32": ("float32", "default", None),
    "f32_x3": ("float32", "BF16_BF16_F32_X3", None),
    "f32_x6": ("float32", "BF16_BF16_F32_X6", None),
    "f32_x9": ("float32", "BF16_BF16_F32_X9", None),
    "tf32_x3": ("float32", "TF32_TF32_F32_X3", None),
    "f64": ("float64", "default", None),
    "int8": ("int8", "default", "int32"),
    "uint8": ("uint8", "default", "int32"),
    "f8": ("float8_e4m3fn", "ANY_F8_ANY_F8_F32", "bfloat16"),
    "f8_fast_accum": ("float8_e4m3fn", "ANY_F8_ANY_F8_F32_FAST_ACCUM", "bfloat16"),
    "c64": ("complex64", "highest", None),
    "c64_x3": ("complex64", "BF16_BF16_F32_X3", None),
    "c64_x6": ("complex64", "BF16_BF16_F32_X6", None),
    "c128": ("complex128", "default", None),
}

_ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "complex64": 8,
    "complex128": 16,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One product of a suite: D[b] (M, N) = op(A)[b] (M, K) x op(B)[b] (K, N)."""

    suite: str
    label: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    layout: str

    kind = "product"
    budget_s = 0.0

    @property
    def title(self) -> str:
        """Description of the case on one line."""
        return f"{self.suite} {self.dtype} {self.layout} {self.shape}"

    @property
    def fields(self) -> dict:
        """Fields of the case in its records."""
        return {
            "suite": self.suite,
            "label": self.label,
            "batch": self.batch,
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "dtype": self.dtype,
            "out": self.out_type,
            "layout": self.layout,
            "epilogue": "identity",
        }

    @property
    def operands(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """A and B as they lie in memory."""
        return (
            jax.ShapeDtypeStruct(self.a_shape, self.element_type),
            jax.ShapeDtypeStruct(self.b_shape, self.element_type),
        )

    def reference(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The product in the dtype that A and B come in."""
        return lax.dot_general(a, b, self.dimension_numbers, precision=lax.Precision.HIGHEST)

    @property
    def element_type(self) -> str:
        """Element type of both operands, as NumPy names it."""
        return DTYPES[self.dtype][0]

    @property
    def precision(self) -> str:
        """The precision asked of JAX."""
        return DTYPES[self.dtype][1]

    @property
    def out_type(self) -> str:
        """Element type of the result, as NumPy names it."""
        return DTYPES[self.dtype][2] or self.element_type

    @property
    def a_shape(self) -> tuple[int, ...]:
        """A as it lies in memory."""
        return self._stored(self.m, self.k, self.layout[0])

    @property
    def b_shape(self) -> tuple[int, ...]:
        """B as it lies in memory."""
        return self._stored(self.k, self.n, self.layout[1])

    @property
    def dimension_numbers(self):
        """Dimension numbers of ``lax.dot_general`` for A and B as stored in memory."""
        first = 1 if self.batch > 1 else 0
        batch_dims = (0,) if self.batch > 1 else ()
        a_contract = first + (1 if self.layout[0] == "N" else 0)
        b_contract = first + (0 if self.layout[1] == "N" else 1)
        return ((a_contract,), (b_contract,)), (batch_dims, batch_dims)

    @property
    def flops(self) -> int:
        """Multiplications and additions; a complex product counts as eight of them."""
        each = 8 if self.dtype.startswith("c") else 2
        return each * self.batch * self.m * self.n * self.k

    @property
    def input_bytes(self) -> int:
        """Bytes of A and B."""
        elements = self.batch * (self.m * self.k + self.k * self.n)
        return elements * _ITEM_BYTES[self.element_type]

    @property
    def bytes(self) -> int:
        """Bytes that any implementation must move: A, B and D once each."""
        return self.input_bytes + self.batch * self.m * self.n * _ITEM_BYTES[self.out_type]

    @property
    def size(self) -> int | None:
        """M when M = N = K and there is one product, else None."""
        return self.m if self.batch == 1 and self.m == self.n == self.k else None

    @property
    def shape(self) -> str:
        """``[batch x] M x N x K`` for people."""
        batch = f"{self.batch}×" if self.batch > 1 else ""
        return f"{batch}{self.m}×{self.n}×{self.k}"

    def _stored(self, rows: int, columns: int, letter: str) -> tuple[int, ...]:
        shape = (rows, columns) if letter == "N" else (columns, rows)
        return (self.batch, *shape) if self.batch > 1 else shape


@dataclasses.dataclass(frozen=True)
class Suite:
    """A named list of cases."""

    name: str
    description: str
    cases: tuple[Case | Workload, ...]


def part_of(chosen: list[Suite], part: str) -> list[Suite]:
    """A share of the cases, such as "2/5": every fifth of all from the second on.

    Raises:
      ValueError: for a text that is no such fraction.
    """
    first, _, step = part.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 1 <= int(first) <= int(step)):
        raise ValueError(
            f"bench: part must be I/N with I from 1 to N, got part={part!r}; 1/2 and 2/2 "
            "are the halves"
        )
    before, kept = 0, []
    for suite in chosen:
        offset = (int(first) - 1 - before) % int(step)
        kept.append(dataclasses.replace(suite, cases=suite.cases[offset :: int(step)]))
        before += len(suite.cases)
    return [suite for suite in kept if suite.cases]


def suite_names() -> list[str]:
    """Names of the suites that ship with the package."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in _folder().iterdir()
        if entry.name.endswith(".toml")
    )


def load_suite(name: str, dtypes: Iterable[str] | None = None) -> Suite:
    """Reads one suite.

    Args:
      name: a name from :func:`suite_names`.
      dtypes: dtype names to measure instead of the suite's own.

    Raises:
      ValueError: for an unknown suite or dtype, or a malformed file.
    """
    check_value("suite", name, suite_names())
    table = tomllib.loads((_folder() / f"{name}.toml").read_text(encoding="utf-8"))
    return parse_suite(name, table, dtypes)


def parse_suite(name: str, table: dict, dtypes: Iterable[str] | None = None) -> Suite:
    """Builds a suite from a parsed file; see the module's documentation for its keys."""
    check_keys(name, table, ("description", "dtypes", "groups", "workload"))
    expand = _expand
    if "workload" in table:
        module = f"jax_tcgemm.bench.workloads.{table['workload']}"
        expand = importlib.import_module(module).workloads
    cases = []
    for dtype in dtypes or table["dtypes"]:
        check_value("dtype", dtype, DTYPES)
        with jax.enable_x64(True):  # Cases say their own types.
            for group in table["groups"]:
                cases.extend(expand(name, group, dtype))
    return Suite(name, table["description"], tuple(dict.fromkeys(cases)))


def _expand(suite: str, group: dict, dtype: str) -> Iterable[Case]:
    check_keys(f"a group of {suite}", group, ("name", "m", "n", "k", "size", "batch", "layout"))
    if "size" in group:
        shapes = [(size, size, size) for size in listed(group["size"])]
    else:
        shapes = itertools.product(*(listed(group[key]) for key in ("m", "n", "k")))
    for (m, n, k), batch, layout in itertools.product(
        shapes, listed(group.get("batch", 1)), listed(group.get("layout", "NN"))
    ):
        check_value("layout", layout, LAYOUTS)
        yield Case(suite, group.get("name", ""), batch, m, n, k, dtype, layout)


@functools.cache
def _folder():
    return resources.files("jax_tcgemm") / "data" / "suites"
