"""An elementwise function as a product's epilogue, as the C++ side knows it (csrc/core/problem.h).

Its code is that of `jax_tcgemm.epilogues`; here is where its operands lie beside a folded product.
"""

import dataclasses
import hashlib
import math
import re
from typing import NamedTuple

import numpy as np

from jax_tcgemm.epilogues import HEADER, EpilogueSource
from jax_tcgemm.epilogues.expressions import STORED, computed, is_narrow

# Of csrc/core/problem.h.
MOST_READS, MOST_RESULTS, MOST_INDICES = 12, 6, 8
# Matrices that TMA can bring, see csrc/epilogue/function_params.h.
MOST_BOXED = 2
# How many neighbours a kernel reduces to one: columns, as the threads of a tile have them, and of a
# gated product, whose tiles have half as many; rows.
_COLUMNS, _GATED_COLUMNS, _ROWS_REDUCED = 16, 8, 8
# Dtypes that kernels store by rows, as D.
_ROWS = frozenset({"__half", "__nv_bfloat16", "float"})


class Numbers(np.ndarray):
    """64-bit integers as an attribute of an FFI call among others, which must be hashable."""

    @classmethod
    def of(cls, numbers) -> "Numbers":
        """Those of a list."""
        return np.array(numbers, np.int64).view(cls)

    def __hash__(self) -> int:
        return hash(self.tobytes())

    def __eq__(self, other) -> bool:
        return isinstance(other, Numbers) and np.array_equal(self.view(np.ndarray), other)


@dataclasses.dataclass(frozen=True)
class Strides:
    """Where an element of an operand lies, in elements.

    That of (outer, inner, m, n) is at ``offset + outer * batch_outer + inner * batch_inner +
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
        """Along what of a matrix it varies: a name of csrc/epilogue/function.cuh."""
        rows, columns = self.m_outer or self.m_inner, self.n_stride
        return ("kBoth" if columns else "kM") if rows else ("kN" if columns else "kNothing")


@dataclasses.dataclass(frozen=True)
class Index:
    """An index along a dimension of the result: that in `level`, // divisor % extent.

    Levels are 0 and 1 of the batch, 2 for m, 3 for n; `is_whole`: the dimension is all of it.
    """

    level: int
    divisor: int
    extent: int
    is_whole: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """An array that a kernel gives.

    Attributes:
      dtype: of an element of it.
      over: "" for one of the product's shape; "columns" for what neighbours in a row, or "rows" for
        what those in a column, are reduced to; "beside" for one that has no array of its own: its
        rows follow each row of the result before it.
      kind: "sum", "max" or "min" of these; "" for none.
      dimensions: of the function's result, which go in the end.
      neighbours: how many are reduced to one; 1 where it is not reduced.
    """

    dtype: np.dtype
    over: str = ""
    kind: str = ""
    dimensions: tuple[int, ...] = ()
    neighbours: int = 1

    def shape(self, batch: int, m: int, n: int) -> tuple[int, int, int]:
        """Its shape, of a product of this one."""
        along_m = self.neighbours if self.over == "rows" else 1
        along_n = self.neighbours if self.over == "columns" else 1
        return batch, -(-m // along_m), -(-n // along_n)


class Cost(NamedTuple):
    """Cost of one element, in instructions of sm_90a.

    Attributes:
      size: of its code, with branches that few arguments take: what is to stay in the instruction
        cache counts by it.
      work: the time in a kernel of ours, in which few threads hide what one waits for.
      loop: the time in a loop of XLA's, in which many do.
    """

    size: int
    work: int
    loop: int


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the sums and of operands, which a kernel is compiled with.

    Attributes:
      name: of the C++ struct.
      definitions: C++ text that defines it.
      reads: for each element that it takes, the operand's number, its bytes, and where it lies.
      indices: for each dimension of the result up to the last that is asked for.
      order: for each result of the C++ struct, the number of the function's.
      results: they, in the struct's order; D is the first.
      cost: what an element takes.
      library: which epilogue of a library it is, a name of csrc/core/problem.h; "none": no such.
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
        """Of each array of results the function's number of it, it, and whether one lies beside."""
        following = (*self.results[1:], None)
        return tuple(
            (number, x, after is not None and after.over == "beside")
            for number, x, after in zip(self.order, self.results, following, strict=True)
            if x.over != "beside"
        )

    def operand_shapes(
        self, batch: int, batch_inner: int, m: int, n: int
    ) -> list[tuple[tuple[int], str]]:
        """Shape and dtype of flat operands that hold all that is read of them in such a product.

        Dtypes are any of as many bytes.
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
        """Bytes of what it reads, and of its results in a batch of `batch_outer`."""
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
        """Its part of the FFI attribute of a problem."""
        reads = [
            number
            for operand, itemsize, strides in self.reads
            for number in (operand, itemsize, *dataclasses.astuple(strides))
        ]
        indices = [n for x in self.indices for n in (x.level, x.divisor, x.extent)]
        forms = ("", "columns", "rows", "beside")
        results = [
            n for x in self.results for n in (x.dtype.itemsize, forms.index(x.over), x.neighbours)
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
    """The results with a whole one first, if there is any, and one that kernels store by rows.

    What lies beside another one stays after that.
    """
    numbers = range(len(source.results))
    whole = [i for i in numbers if source.results[i].reduction is None]
    rows = [i for i in whole if _stores_rows(source, i)]
    first = (rows or whole or numbers)[0]
    has_two = over[first + 1 : first + 2] == ("beside",)
    head = numbers[first : first + 1 + has_two]
    return (*head, *(i for i in numbers if i not in head))


def _stores_rows(source: EpilogueSource, number: int) -> bool:
    """Whether kernels store a result by rows where it is D."""
    x = source.results[number]
    return x.reduction is None and STORED[x.dtype] in _ROWS


def make_function(
    source: EpilogueSource,
    operands: tuple[int, ...],
    strides: tuple[Strides, ...],
    indices: tuple[Index, ...],
    over: tuple[str, ...],
) -> Function:
    """A function whose operands, indices and results have been placed.

    Args:
      source: its code.
      operands: for each of `source.reads`, the number of the operand in the call.
      strides: for each of them, where it lies.
      indices: as of `Function`.
      over: for each of `source.results`, as of `Result`; what lies beside another one comes after
        that.
    """
    order = _order_of_results(source, over)
    columns = _COLUMNS if len(source.accumulators) == 1 else _GATED_COLUMNS
    neighbours = {"columns": columns, "rows": _ROWS_REDUCED}
    results = tuple(_result(source.results[i], over[i], neighbours.get(over[i], 1)) for i in order)
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


def _result(x, over: str, neighbours: int) -> Result:
    if x.reduction is None:
        return Result(x.dtype, over)
    # What is narrow is added up as it is computed with.
    dtype = np.dtype(np.float32) if is_narrow(x.dtype) else x.dtype
    return Result(dtype, over, x.reduction.kind, x.reduction.dimensions, neighbours)


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
    """The cost of an element: one for each line of the code, and those of functions."""
    called = re.findall(r"\b(\w+)\(", source.struct)
    names = (name if name in _COSTS else name.removesuffix("f") for name in called)
    lines = len(source.struct.splitlines())
    own = [Cost(lines, lines, lines), *(_COSTS[name] for name in names if name in _COSTS)]
    return Cost(*map(sum, zip(*own, strict=True)))


def _struct(source, order, strides, indices, placed, size: int) -> str:
    """What csrc/epilogue/function.cuh asks of a function."""
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
        f"  static constexpr int kMostNeighbours = {max(x.neighbours for x in placed)};\n"
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
    """What stores a result."""
    if x.reduction is None:
        return f"tile.template store<{slot}, {STORED[x.dtype]}>()"
    kind = f"epilogue::Reduction::k{x.reduction.kind.capitalize()}"
    types = f"{slot}, {STORED[x.dtype]}, {computed(x.dtype)}"
    over = f"epilogue::Over::k{placed.over.capitalize()}"
    return f"tile.template reduce<{types}, {kind}, {over}, {placed.neighbours}>()"
