"""An elementwise function as a GEMM's epilogue, the mirror of csrc/core/problem.h.

`jax_tcgemm.epilogues` emits the function's code. This module adds the strides of its operands, for
a GEMM whose dimensions are folded to (batch, m, n), and the C++ struct that a kernel includes.
"""

import dataclasses
import hashlib
import math
import re
from typing import NamedTuple

import numpy as np

from jax_tcgemm.epilogues import HEADER, EpilogueSource
from jax_tcgemm.epilogues.code.expressions import STORED, computed, is_narrow

# Limits of csrc/core/problem.h.
MOST_READS, MOST_RESULTS, MOST_INDICES = 12, 6, 8
# The most matrices that are loaded by TMA, see csrc/epilogue/function_params.h.
MOST_BOXED = 2
# Number of adjacent elements that a kernel reduces to one: along columns, along columns of a gated
# GEMM, whose tiles have half as many; along rows.
_COLUMNS, _GATED_COLUMNS, _ROWS_REDUCED = 16, 8, 8
# C++ dtypes that kernels can store by rows, as they store D.
_ROWS = frozenset({"__half", "__nv_bfloat16", "float"})


class Numbers(np.ndarray):
    """Hashable array of 64-bit integers, for attributes of an FFI call."""

    @classmethod
    def of(cls, numbers) -> "Numbers":
        """Return the array of a list of integers."""
        return np.array(numbers, np.int64).view(cls)

    def __hash__(self) -> int:
        return hash(self.tobytes())

    def __eq__(self, other) -> bool:
        return isinstance(other, Numbers) and np.array_equal(self.view(np.ndarray), other)


@dataclasses.dataclass(frozen=True)
class Strides:
    """Strides of an epilogue operand, in elements.

    The element of (outer, inner, m, n) is at ``offset + outer * batch_outer + inner * batch_inner +
    m // period * m_outer + m % period * m_inner + n * n_stride``.
    """

    offset: int
    batch_outer: int
    batch_inner: int
    m_outer: int
    m_inner: int
    period: int
    n_stride: int

    @property
    def along(self) -> str:
        """Dimensions along which the operand varies, a name of csrc/epilogue/function.cuh."""
        rows, columns = self.m_outer or self.m_inner, self.n_stride
        return ("kBoth" if columns else "kM") if rows else ("kN" if columns else "kNothing")


@dataclasses.dataclass(frozen=True)
class Index:
    """Index along a dimension of the result: ``index of level // divisor % extent``.

    Levels are 0 and 1 for the outer and inner batch, 2 for m and 3 for n. `is_whole` says that the
    dimension is the whole level.
    """

    level: int
    divisor: int
    extent: int
    is_whole: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of an epilogue function.

    Attributes:
      dtype: dtype of an element.
      over: "" for a result of the product's shape; "columns" where adjacent elements of a row are
        reduced, "rows" where those of a column are; "beside" for a result without an array of its
        own, whose rows alternate with the rows of the result before it.
      kind: reduction "sum", "max" or "min"; "" for none.
      dimensions: dimensions of the function's result that XLA finally reduces.
      neighbors: number of adjacent elements that the kernel reduces to one; 1 without reduction.
    """

    dtype: np.dtype
    over: str = ""
    kind: str = ""
    dimensions: tuple[int, ...] = ()
    neighbors: int = 1

    def shape(self, batch: int, m: int, n: int) -> tuple[int, int, int]:
        """Return the shape that the kernel gives for a product of shape (batch, m, n)."""
        along_m = self.neighbors if self.over == "rows" else 1
        along_n = self.neighbors if self.over == "columns" else 1
        return batch, -(-m // along_m), -(-n // along_n)


class Cost(NamedTuple):
    """Cost of one element, in instructions of sm_90a.

    Attributes:
      size: code size, rarely taken branches included: the demand on the instruction cache.
      work: time in a GEMM kernel, where few threads hide latencies.
      loop: time in an XLA loop, where many threads hide latencies.
    """

    size: int
    work: int
    loop: int


@dataclasses.dataclass(frozen=True)
class Function:
    """Epilogue function of the accumulators and further operands, compiled into a kernel.

    Attributes:
      name: name of the C++ struct.
      definitions: C++ text that defines the struct.
      reads: for each element read: the operand's number, the bytes of an element, and the strides.
      indices: an index for each dimension of the result, up to the last one that the code uses.
      order: for each result of the C++ struct, the number of the function's result.
      results: the results in the struct's order; the first one is D.
      cost: cost of one element.
      library: name of the equivalent library epilogue (csrc/core/problem.h), or "none".
    """

    name: str
    definitions: str
    reads: tuple[tuple[int, int, Strides], ...]
    indices: tuple[Index, ...]
    order: tuple[int, ...]
    results: tuple[Result, ...]
    cost: Cost
    library: str = "none"

    @property
    def arrays(self) -> tuple[tuple[int, Result, bool], ...]:
        """For each result array: its number, the result, and whether a "beside" one shares it."""
        following = (*self.results[1:], None)
        return tuple(
            (number, x, after is not None and after.over == "beside")
            for number, x, after in zip(self.order, self.results, following, strict=True)
            if x.over != "beside"
        )

    def operand_shapes(
        self, batch: int, batch_inner: int, m: int, n: int
    ) -> list[tuple[tuple[int], str]]:
        """Return shapes and dtypes of flat operands just large enough for a product of this shape.

        Each dtype is an arbitrary one with the operand's element size.
        """
        sizes = {}
        for operand, itemsize, x in self.reads:
            steps = (
                (x.batch_outer, batch // max(batch_inner, 1)),
                (x.batch_inner, batch_inner),
                (x.m_outer, -(-m // x.period)),
                (x.m_inner, min(m, x.period)),
                (x.n_stride, n),
            )
            last = x.offset + sum(max(stride, 0) * (extent - 1) for stride, extent in steps)
            known, _ = sizes.get(operand, (0, 0))
            sizes[operand] = max(known, last + 1), itemsize
        dtypes = {1: "u8", 2: "bf16", 4: "f32", 8: "f64"}
        return [((size,), dtypes[itemsize]) for _, (size, itemsize) in sorted(sizes.items())]

    def bytes(self, batch_outer: int, batch_inner: int, m: int, n: int) -> int:
        """Return the bytes read and written; results have `batch_outer` batch entries."""
        extents = {"kBoth": m * n, "kM": m, "kN": n, "kNothing": 1}
        read = sum(
            itemsize
            * extents[strides.along]
            * (batch_outer if strides.batch_outer else 1)
            * (batch_inner if strides.batch_inner else 1)
            for _, itemsize, strides in self.reads
        )
        shapes = (x.shape(batch_outer, m, n) for x in self.results)
        pairs = zip(self.results, shapes, strict=True)
        return read + sum(x.dtype.itemsize * math.prod(shape) for x, shape in pairs)

    def attributes(self) -> dict:
        """Return the function's fields of a problem's FFI attribute."""
        reads = [
            number
            for operand, itemsize, strides in self.reads
            for number in (operand, itemsize, *dataclasses.astuple(strides))
        ]
        indices = [n for x in self.indices for n in (x.level, x.divisor, x.extent)]
        forms = ("", "columns", "rows", "beside")
        results = [
            n for x in self.results for n in (x.dtype.itemsize, forms.index(x.over), x.neighbors)
        ]
        return {
            "function": self.name,
            "function_library": self.library,
            "function_reads": Numbers.of(reads),
            "function_indices": Numbers.of(indices),
            "function_results": Numbers.of(results),
        }


def attributes_of(function: Function | None) -> dict:
    """Return the FFI attributes of a problem's function, or of none."""
    return NO_FUNCTION if function is None else function.attributes()


NO_FUNCTION = {
    "function": "",
    "function_library": "none",
    "function_reads": Numbers.of([]),
    "function_indices": Numbers.of([]),
    "function_results": Numbers.of([]),
}


def _order_of_results(source: EpilogueSource, over: tuple[str, ...]) -> tuple[int, ...]:
    """Return the numbers of the results in the struct's order.

    The first one becomes D: preferably an unreduced result that kernels can store by rows, else any
    unreduced one. A "beside" result stays after its partner.
    """
    numbers = range(len(source.results))
    whole = [i for i in numbers if source.results[i].reduction is None]
    rows = [i for i in whole if _stores_rows(source, i)]
    first = (rows or whole or numbers)[0]
    has_two = over[first + 1 : first + 2] == ("beside",)
    head = numbers[first : first + 1 + has_two]
    return (*head, *(i for i in numbers if i not in head))


def _stores_rows(source: EpilogueSource, number: int) -> bool:
    """Return whether kernels can store a result by rows, as D."""
    x = source.results[number]
    return x.reduction is None and STORED[x.dtype] in _ROWS


def make_function(
    source: EpilogueSource,
    operands: tuple[int, ...],
    strides: tuple[Strides, ...],
    indices: tuple[Index, ...],
    over: tuple[str, ...],
) -> Function:
    """Make the function of emitted code, with strides of its operands and kinds of its results.

    Args:
      source: the emitted code.
      operands: for each of `source.reads`, the number of the operand in the call.
      strides: for each of `source.reads`, the operand's strides.
      indices: `Function.indices`.
      over: for each of `source.results`, `Result.over`; a "beside" result follows its partner.
    """
    order = _order_of_results(source, over)
    columns = _COLUMNS if len(source.accumulators) == 1 else _GATED_COLUMNS
    neighbors = {"columns": columns, "rows": _ROWS_REDUCED}
    results = tuple(_result(source.results[i], over[i], neighbors.get(over[i], 1)) for i in order)
    cost = _cost(source)
    body = _struct(source, order, strides, indices, results, cost.size)
    name = "Function_" + hashlib.sha256((source.struct + body).encode()).hexdigest()[:16]
    namespace = "namespace tcgemm::elementwise"
    definitions = (
        f'#include "{HEADER}"\n\n{namespace}::of_{name} {{\n\n{source.struct}\n}}  // {namespace}\n'
        f"\n{namespace} {{\n\n{body.replace('NAME', name)}\n}}  // {namespace}\n"
    )
    reads = zip(operands, (x.dtype.itemsize for x in source.reads), strides, strict=True)
    return Function(name, definitions, tuple(reads), indices, order, results, cost)


def _result(x, over: str, neighbors: int) -> Result:
    if x.reduction is None:
        return Result(x.dtype, over)
    # Narrow dtypes are reduced in float32, in which they are computed.
    dtype = np.dtype(np.float32) if is_narrow(x.dtype) else x.dtype
    return Result(dtype, over, x.reduction.kind, x.reduction.dimensions, neighbors)


def _alike(**sizes: int) -> dict[str, Cost]:
    return {name: Cost(size, size, size) for name, size in sizes.items()}


# Costs of float32 functions with more than two instructions, by nvcc 13.0; times that differ
# were measured on an H100.
_COSTS = {
    **{"sine": Cost(90, 50, 25), "cosine": Cost(88, 50, 25), "tangent": Cost(114, 70, 40)},
    "pow": Cost(87, 108, 62),
    **_alike(asin=25, acos=26, atan=19, atan2=126, sinh=25, cosh=16, tanh=17, asinh=42, acosh=43),
    **_alike(atanh=39, exp=10, exp2=4, expm1=29, log=28, log1p=28, log2=30, logistic=11, sqrt=10),
    **_alike(rsqrt=4, cbrt=16, divide=9, remainder=30, fmod=59, erf=30, erfc=48, erfinv=28),
    **_alike(lgamma=200, digamma=100, threefry2x32=64),
}


def _cost(source: EpilogueSource) -> Cost:
    """Return the cost of an element: 1 for each line of code, plus `_COSTS` of called functions."""
    called = re.findall(r"\b(\w+)\(", source.struct)
    names = (name if name in _COSTS else name.removesuffix("f") for name in called)
    lines = len(source.struct.splitlines())
    own = [Cost(lines, lines, lines), *(_COSTS[name] for name in names if name in _COSTS)]
    return Cost(*map(sum, zip(*own, strict=True)))


def _struct(source, order, strides, indices, placed, size: int) -> str:
    """Return the C++ struct with the members that csrc/epilogue/function.cuh requires."""
    reads = [STORED[x.dtype] for x in source.reads]
    results = [STORED[x.dtype] for x in source.results]
    given = [
        f"{i}, {x}, epilogue::Along::{y.along}"
        for i, (x, y) in enumerate(zip(reads, strides, strict=True))
    ]
    sums = ["sum", "up"][: len(source.accumulators)]
    arguments = [*sums, *(f"element.template read<{x}>()" for x in given), "at"]
    arguments += [f"y{i}" for i in range(len(results))]
    whole = "".join(
        f"    if (dim == {dim}) return {x.level};\n" for dim, x in enumerate(indices) if x.is_whole
    )

    def calls(lines) -> str:
        return "".join(f"    {line};\n" for line in lines)

    def function(head: str, body: str) -> str:
        return f"  {head} {{\n{body}  }}\n"

    def steps(name: str) -> list[str]:
        return [f"tile.template {name}<{x}>()" for x in given]

    inline = "static __device__ __forceinline__"
    run = [f"{computed(x.dtype)} y{i}" for i, x in enumerate(source.results)]
    run.append(f"of_NAME::Epilogue::apply({', '.join(arguments)})")
    run += [f"element.template write<{slot}, {results[i]}>(y{i})" for slot, i in enumerate(order)]
    stores = [
        _stored(slot, source.results[i], x)
        for slot, (i, x) in enumerate(zip(order, placed, strict=True))
    ]
    sizes = dict.fromkeys(("kNothing", "kM", "kN", "kBoth"), 0)
    for x, y in zip(source.reads, strides, strict=True):
        sizes[y.along] += x.dtype.itemsize
    bytes_text = "".join(
        f"    if (along == epilogue::Along::{along}) return {number};\n"
        for along, number in sizes.items()
        if number
    )
    boxed = [
        i
        for i, (x, y) in enumerate(zip(source.reads, strides, strict=True))
        if y.along == "kBoth" and x.dtype.itemsize in (2, 4)
    ][:MOST_BOXED]
    boxed_bytes = [source.reads[i].dtype.itemsize for i in boxed]

    def of_boxed(numbers, default: int) -> str:
        lines = (f"    if (i == {i}) return {n};\n" for i, n in zip(boxed, numbers, strict=True))
        return "".join(lines) + f"    return {default};\n"

    parameters = ", ".join(f"const Sum {x}" for x in sums)
    return (
        "struct NAME {\n"
        f"  using Sum = {computed(source.accumulators[0])};\n"
        f"  static constexpr bool kIsGated = {str(len(sums) == 2).lower()};\n"
        f"  static constexpr int kMostReads = {max(len(reads), 1)}, kNumResults = {len(results)};\n"
        f"  static constexpr int kMostNeighbors = {max(x.neighbors for x in placed)};\n"
        f"  static constexpr int kBoxedBytes = {sum(boxed_bytes)}, kWork = {size};\n"
        f"  static constexpr bool kStoresRows = {str(_stores_rows(source, order[0])).lower()};\n"
        + function(f"{inline} constexpr int whole_level(int dim)", f"{whole}    return -1;\n")
        + function(
            f"{inline} constexpr int bytes(epilogue::Along along)", f"{bytes_text}    return 0;\n"
        )
        + function(f"{inline} constexpr int boxed(int i)", of_boxed(range(len(boxed)), -1))
        + function(f"{inline} constexpr int boxed_bytes(int i)", of_boxed(boxed_bytes, 0))
        + "  template <typename Tile>\n"
        + function(f"{inline} void load(Tile& tile)", calls(steps("load")))
        + "  template <typename Tile>\n"
        + function(f"{inline} void arrive(Tile& tile)", calls(steps("arrive")))
        + "  template <typename Element, typename Index>\n"
        + function(
            f"{inline} void run({parameters}, Element& element, const Index& at)", calls(run)
        )
        + "  template <typename Tile>\n"
        + function(f"{inline} void store(Tile& tile)", calls(stores))
        + "};\n"
    )


def _stored(slot: int, x, placed: Result) -> str:
    """Return the C++ expression that stores or reduces a result."""
    if x.reduction is None:
        return f"tile.template store<{slot}, {STORED[x.dtype]}>()"
    kind = f"epilogue::Reduction::k{x.reduction.kind.capitalize()}"
    types = f"{slot}, {STORED[x.dtype]}, {computed(x.dtype)}"
    over = f"epilogue::Over::k{placed.over.capitalize()}"
    return f"tile.template reduce<{types}, {kind}, {over}, {placed.neighbors}>()"
