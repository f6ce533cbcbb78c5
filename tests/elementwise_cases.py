"""Elementwise functions as device code, compiled by g++ and by NVRTC: cases, and what checks them.

JAX runs one primitive at a time, since XLA leaves out roundings and contracts products and sums
where it compiles several together. Its programs take subnormal numbers for 0, and so does the
generated code while it is compared with them; with subnormal numbers NumPy is the reference.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elementwise_library import Library
from emulated import reason
from jax.extend import core

from jax_tcgemm.epilogues import HEADER, EpilogueSource, Result, emit
from jax_tcgemm.epilogues.code.expressions import STORED, computed
from jax_tcgemm.kernels import Instance, nvrtc

of_elements = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:.* encountered in cast:RuntimeWarning"),
]
needs_compiler = pytest.mark.skipif(bool(reason()), reason=reason())
needs_nvrtc = pytest.mark.skipif(bool(nvrtc.reason()), reason=nvrtc.reason())

F16, BF16, F32, F64 = (np.dtype(x) for x in (np.float16, jnp.bfloat16, np.float32, np.float64))
E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
FLOATS = (F16, BF16, F32, F64)
INTEGERS = tuple(np.dtype(f"{k}int{bits}") for k in ("", "u") for bits in (8, 16, 32, 64))
BOOL, I8, I32, U32 = (np.dtype(x) for x in (bool, np.int8, np.int32, np.uint32))

SHAPE = (3, 6, 20)  # of results, and of accumulators


def is_float(dtype):
    return jnp.issubdtype(dtype, jnp.floating)


def special(dtype):
    """Numbers at which functions and conversions are most often wrong; none is subnormal."""
    if dtype == BOOL:
        return np.array([False, True])
    if not is_float(dtype):
        info = jnp.iinfo(dtype)
        around = [
            0,
            1,
            2,
            3,
            7,
            8,
            31,
            32,
            63,
            64,
            127,
            128,
            255,
            256,
            448,
            465,
            2049,
            65520,
            2**24 + 1,
        ]
        numbers = [*around, info.max, info.max - 1, info.min, info.min + 1]
        numbers += [-x for x in around if info.min < 0]
        return np.array([x for x in numbers if info.min <= x <= info.max], dtype)
    info = jnp.finfo(dtype)
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 127.5, 128.5, 255.5, 448.0, 464.0, 465.0, 1e-3]
    numbers += [2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 61439.0, 61440.0, 65519.0, 65520.0, 1e-20]
    numbers += [2.0**7, 2.0**15, 2.0**31, 2.0**32, 2.0**63, 2.0**64, np.inf, float(info.max)]
    numbers += [float(info.tiny), 1 + 2.0**-8, 1 + 2.0**-11, 1 + 2.0**-4 + 2.0**-40, np.nan]
    array = np.array([*numbers, *(-x for x in numbers)])
    with np.errstate(all="ignore"):
        array = array.astype(dtype)
        wide = array.astype(np.float64)
    return array[~(abs(wide) < float(jnp.finfo(F32).tiny)) | (wide == 0)]


def draw(rng, shape, dtype, *, tame=False):
    """Random numbers of all sizes, special ones among them; `tame`: finite ones around 1."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape))
    if tame or dtype == BOOL:
        return (3 * rng.standard_normal(size)).astype(dtype).reshape(shape)
    if is_float(dtype):
        largest = int(jnp.finfo(dtype).maxexp) - 1
        exponents = rng.integers(-min(largest, 100), largest, size)
        exponents = np.where(rng.random(size) < 0.7, rng.integers(-4, 5, size), exponents)
        numbers = np.ldexp(rng.standard_normal(size), exponents)
    else:
        info = jnp.iinfo(dtype)
        numbers = rng.integers(info.min, info.max, size, dtype, endpoint=True)
        numbers = np.where(rng.random(size) < 0.5, numbers, rng.integers(0, 10, size))
    with np.errstate(all="ignore"):
        numbers = numbers.astype(dtype)
    chosen = special(dtype)
    places = rng.random(size) < 0.3
    numbers[places] = rng.choice(chosen, places.sum())
    return numbers.reshape(shape)


def flushed(x):
    """With 0 for subnormal numbers that XLA takes for it."""
    if x.dtype in (BF16, F32, F64):
        with np.errstate(all="ignore"):
            wide = x.astype(np.float64)
        is_small = abs(wide) < float(jnp.finfo(x.dtype).tiny)
        return np.where(is_small, np.copysign(0, wide).astype(x.dtype), x)
    return x


def check(got, want, ulps=0):
    """`ulps`: how far numbers may be apart, in units of the last place of 1 or a larger one."""
    got, want = flushed(np.asarray(got)), flushed(np.asarray(want))
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if not is_float(got.dtype):
        np.testing.assert_array_equal(got, want)
        return
    x, y = (z.astype(np.float64) for z in (got, want))
    np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
    x, y = np.nan_to_num(x, nan=0), np.nan_to_num(y, nan=0)
    if not ulps:
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(np.signbit(x), np.signbit(y))
        return
    np.testing.assert_array_equal(np.isinf(x), np.isinf(y))
    x, y = np.nan_to_num(x, posinf=0, neginf=0), np.nan_to_num(y, posinf=0, neginf=0)
    allowed = ulps * float(jnp.finfo(got.dtype).eps) * np.maximum(abs(y), 1)
    np.testing.assert_array_less(abs(x - y), allowed + np.finfo(float).tiny)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of accumulators and operands, and what it is given.

    Attributes:
      function: the function.
      operands: a shape and a dtype each; a key where there is none.
      accumulators: their dtypes.
      shape: of the accumulators.
      ulps: see `check`.
      tame: see `draw`.
      at_once: whether JAX may compile it as a whole, for results that each take one primitive.
    """

    function: Callable
    operands: tuple = ()
    accumulators: tuple = (F32,)
    shape: tuple = SHAPE
    ulps: float = 0
    tame: bool = False
    at_once: bool = False

    @functools.cached_property
    def arguments(self):
        rng = np.random.default_rng(0)
        accumulators = [draw(rng, self.shape, x, tame=self.tame) for x in self.accumulators]
        operands = [
            draw(rng, *x, tame=self.tame) if x else jax.random.key(7) for x in self.operands
        ]
        return accumulators, operands

    @functools.cached_property
    def emitted(self):
        accumulators, operands = self.arguments
        jaxpr = jax.make_jaxpr(self.function)(*accumulators, *operands)
        return emit(jaxpr, len(accumulators))

    @property
    def source(self) -> EpilogueSource:
        return self.emitted[0]

    def run(self, library):
        """The function's results, by the generated code."""
        accumulators, operands = self.arguments
        operands = [*operands, *self.emitted[1]]
        results = library.run(self.source, accumulators, operands, flush=True)
        return [reduce(*x) for x in zip(results, self.source.results, strict=True)]

    def expected(self):
        accumulators, operands = self.arguments
        function = jax.jit(self.function) if self.at_once else self.function
        with jax.disable_jit(not self.at_once):
            results = function(*map(jnp.asarray, accumulators), *map(jnp.asarray, operands))
        return jax.tree.leaves_with_path(results)

    def check(self, library, expected=None):
        """`expected`: the results by JAX, with their paths, where they are known."""
        expected = self.expected() if expected is None else expected
        for got, (path, want) in zip(self.run(library), expected, strict=True):
            want = np.asarray(want)
            if got.shape != want.shape or got.dtype != want.dtype:  # after a reduction
                got = np.asarray(jnp.asarray(got).astype(want.dtype)).reshape(want.shape)
            try:
                check(got, want, self.ulps)
            except AssertionError as error:
                error.add_note(f"result {jax.tree_util.keystr(path)}")
                raise


# Primitives that move numbers and compute nothing.
MOVES = ("broadcast_in_dim", "iota", "reshape", "rev", "slice", "squeeze", "transpose")


def expected_of(cases):
    """What `Case.expected` gives for each case, by few programs.

    The first program computes what takes one primitive, besides moves, and each next one what takes
    one more: XLA rounds its results as where it compiles that primitive alone.
    """
    arguments = [[jnp.asarray(x) for own in case.arguments for x in own] for case in cases]

    def functions(arguments):
        return [case.function(*own) for case, own in zip(cases, arguments, strict=True)]

    with jax.disable_jit():  # for equations of primitives only
        closed, shapes = jax.make_jaxpr(functions, return_shape=True)(arguments)
    given = closed.jaxpr.constvars + closed.jaxpr.invars
    arrays = dict(zip(map(id, given), [*closed.consts, *jax.tree.leaves(arguments)], strict=True))
    steps, places = collections.defaultdict(list), {}
    for eqn in closed.jaxpr.eqns:
        before = max((places.get(id(x), 0) for x in eqn.invars), default=0)
        place = max(before + (eqn.primitive.name not in MOVES), 1)
        steps[place].append(eqn)
        places |= dict.fromkeys(map(id, eqn.outvars), place)
        # Numbers in the code are arguments, too: XLA would simplify what it does with constants.
        literals = (x for x in eqn.invars if isinstance(x, core.Literal))
        arrays |= {id(x): jnp.asarray(x.val, x.aval.dtype) for x in literals}
    for place in sorted(steps):
        later = [x for at in steps if at > place for eqn in steps[at] for x in eqn.invars]
        arrays |= computed_at_once(steps[place], arrays, {*map(id, later + closed.jaxpr.outvars)})
    results = [arrays[id(x)] for x in closed.jaxpr.outvars]
    results = jax.tree.unflatten(jax.tree.structure(shapes), results)
    return [jax.tree.leaves_with_path(own) for own in results]


def computed_at_once(eqns, arrays, used):
    """The results of equations that are among `used`, by one program; variables by their ids."""
    given = {id(x): arrays[id(x)] for eqn in eqns for x in eqn.invars if id(x) in arrays}
    kept = collections.defaultdict(list)
    for variable in (x for eqn in eqns for x in eqn.outvars if id(x) in used):
        kept[variable.aval.dtype].append(variable)

    @jax.jit
    def program(given):
        values = dict(given)
        for eqn in eqns:
            found = eqn.primitive.bind(*(values[id(x)] for x in eqn.invars), **eqn.params)
            found = found if eqn.primitive.multiple_results else [found]
            values |= zip(map(id, eqn.outvars), found, strict=True)
        # Behind one another, they take one loop, where each alone would take one of its own.
        return [jnp.concatenate([values[id(x)].ravel() for x in own]) for own in kept.values()]

    found = {}
    for own, together in zip(kept.values(), map(np.asarray, program(given)), strict=True):
        pieces = np.split(together, np.cumsum([x.aval.size for x in own])[:-1])
        found |= {id(x): piece.reshape(x.aval.shape) for x, piece in zip(own, pieces, strict=True)}
    return found


def reduce(x, result: Result):
    """What a kernel makes of what the function gives for each element."""
    if result.reduction is None:
        return x
    function = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[result.reduction.kind]
    return np.asarray(function(jnp.asarray(x), result.reduction.dimensions))


def checked(cases):
    """A fixture with the cases' functions compiled together, and a test of each."""

    @pytest.fixture(scope="module")
    def library(tmp_path_factory):
        with jax.enable_x64(True):
            sources = [case.source for case in cases.values()]
        return Library(tmp_path_factory.mktemp("elementwise"), sources)

    return library, pytest.mark.parametrize("name", cases)


def kernel(sources, target) -> Instance:
    """A kernel with all functions, which none of them can be left out of."""
    cases = ""
    for number, source in enumerate(sources):
        types = [computed(dtype) for dtype in source.accumulators]
        types += [STORED[read.dtype] for read in source.reads]
        arguments = [f"element<{x}>(arrays, {i})" for i, x in enumerate(types)] + ["Index{}"]
        arguments += [
            f"element<{computed(result.dtype)}>(arrays, {i + len(types)})"
            for i, result in enumerate(source.results)
        ]
        apply = f"number_{number}::Epilogue::apply({', '.join(arguments)});"
        cases += f"    case {number}: {apply} break;\n"
    structs = "".join(
        f"namespace number_{number} {{\n{source.struct}}}\n"
        for number, source in enumerate(sources)
    )
    text = f"""
namespace tcgemm::elementwise {{
{structs}
struct Index {{
  __device__ int32_t operator[](int dim) const {{ return threadIdx.x >> 2 * dim & 15; }}
}};
template <typename T>
__device__ T& element(void** arrays, int number) {{
  return static_cast<T*>(arrays[number])[threadIdx.x];
}}
__global__ void kernel(int which, void** arrays) {{
  switch (which) {{
{cases}  }}
}}
}}  // namespace tcgemm::elementwise
"""
    return Instance("elementwise", (HEADER,), "tcgemm::elementwise::kernel", target, text)


def compiles(cases, target):
    """Asserts that NVRTC compiles the cases' functions, and finds nothing to say of them."""
    sources = dict.fromkeys(case.source for case in cases.values())
    compiled = nvrtc.compile_kernel(kernel(sources, target))
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.faults == ()
