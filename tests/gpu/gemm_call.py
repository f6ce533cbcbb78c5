"""Calls of the FFI target itself, below the public functions.

They set what the public functions never do: alpha and beta, padded leading dimensions, gaps
between batch entries, a result that is full of NaN before the kernel runs.

Inputs are small integers, which every dtype holds and every accumulator adds without rounding, so
that results are compared for equality: one element taken from the wrong place shows. Accuracy on
real numbers is a test of its own.
"""

import dataclasses
import functools

import jax
import numpy as np

from jax_tcgemm import selection
from jax_tcgemm.device.call import call as custom_call
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection.configs import MmaSyncConfig, WgmmaConfig, parse_or_none
from jax_tcgemm.system import modules

LAYOUTS = ("NN", "NT", "TN", "TT")


@dataclasses.dataclass(frozen=True)
class Types:
    """Dtype of both inputs ("s8,u8": of A, then of B), of the result, and the accumulator."""

    inputs: str
    out: str
    compute: str

    def __str__(self):
        return f"{self.inputs}-{self.out}-{self.compute}"

    @property
    def a(self) -> str:
        """Dtype of A."""
        return self.inputs.split(",")[0]

    @property
    def b(self) -> str:
        """Dtype of B."""
        return self.inputs.split(",")[-1]


ALL_TYPES = [
    Types(*names.split())
    for names in (
        *("f16 f16 f32", "f16 bf16 f32", "f16 f32 f32", "f16 f16 f16", "f16 f32 f16"),
        *("bf16 bf16 f32", "bf16 f16 f32", "bf16 f32 f32"),
        *("f32 f32 f32", "f32 f16 f32", "f32 bf16 f32"),
        *("f32 f32 tf32", "f32 f16 tf32", "f32 bf16 tf32"),
        *("f64 f64 f64", "s8 s32 s32", "u8 s32 s32", "s8,u8 s32 s32", "u8,s8 s32 s32"),
        *("c64 c64 f32", "c64 c64 tf32", "c128 c128 f64"),
    )
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One product: sizes, and how its operands lie in memory."""

    label: str
    m: int
    n: int
    k: int
    batch: tuple[int, int] = (1, 1)  # Outer and inner level.
    pad: int = 0  # Elements between the rows of A and of B.
    gap: tuple[int, int] = (0, 0)  # Elements between the entries of either batch level.
    broadcast: str = ""  # "a", "b": one matrix for the whole batch; "a_inner": one for each outer.
    alpha: float = 1.0
    beta: float = 0.0

    def __str__(self):
        return self.label


# The smallest, the longest and the oddest of each size, and every way to lie in memory.
CASES = [
    Case("aligned", 256, 256, 256),
    Case("one_off_a_tile", 129, 136, 63),
    Case("k_below_a_stage", 64, 72, 8),
    Case("no_k", 33, 17, 0),
    Case("one_element", 1, 1, 1),
    Case("one_row", 1, 257, 72),
    Case("one_column", 257, 1, 72),
    Case("all_odd", 257, 255, 131),
    Case("long_k", 72, 64, 2048),
    Case("padded_by_8", 128, 144, 96, pad=8),
    Case("padded_by_3", 70, 90, 64, pad=3),
    Case("batch_of_3", 65, 72, 40, batch=(1, 3)),
    # Leading dimensions stay aligned while the entries after the first start anywhere.
    Case("batch_at_odd_addresses", 128, 128, 64, batch=(1, 3), gap=(0, 1)),
    Case("batch_one_a", 96, 80, 48, batch=(1, 3), broadcast="a"),
    Case("batch_one_b", 33, 80, 48, batch=(1, 3), broadcast="b"),
    Case("batch_of_2_by_3", 40, 48, 64, batch=(2, 3), gap=(8, 0)),
    Case("batch_of_2_by_3_one_a_for_3", 40, 47, 33, batch=(2, 3), broadcast="a_inner"),
    Case("alpha", 136, 120, 64, alpha=0.5),
    Case("alpha_beta", 128, 128, 64, alpha=0.5, beta=-2.0),
    Case("alpha_beta_odd_batch", 67, 45, 29, batch=(1, 2), alpha=2.0, beta=1.0),
    Case("beta_without_k", 33, 17, 0, beta=1.0),
    Case("no_rows", 0, 64, 32),
    Case("no_columns", 64, 0, 32),
    Case("no_batch", 64, 64, 32, batch=(0, 1)),
]

PLAIN = CASES[0]

# What each config meets in each layout: full tiles, cut tiles and stages, split-K, odd addresses,
# an epilogue.
CONFIG_LABELS = {"aligned", "one_off_a_tile", "k_below_a_stage", "no_k", "one_element", "all_odd"}
CONFIG_LABELS |= {"long_k", "batch_at_odd_addresses", "alpha_beta", "alpha_beta_odd_batch"}
CONFIG_CASES = [case for case in CASES if case.label in CONFIG_LABELS]
# And in one layout, since they take longer. Of tiles there are more than a GPU has processors,
# so that persistent blocks take several.
LARGE_CASES = [Case("many_stages", 1024, 768, 512), Case("many_tiles", 2056, 3080, 72)]
# And where it only splits K.
SPLIT_LABELS = {"one_off_a_tile", "long_k", "no_k", "alpha_beta_odd_batch"}
SPLIT_CASES = [case for case in CASES if case.label in SPLIT_LABELS]


@functools.cache
def implementations() -> dict[str, list[str]]:
    """Every CUDA implementation with its configs, the default first.

    But for those of tiny matrices alone, which test_batched.py tests.
    """
    if modules.cuda is None:
        return {}
    modules.reason("cublaslt")  # Loads it, without which it accepts nothing.
    found = modules.cuda.implementations().items()
    return {name: configs for name, configs in found if name != "simt_batched"}


@functools.cache
def split_base(config: str) -> str:
    """The config whose kernel this one runs with K split, as its suffix says; else ""."""
    parsed = parse_or_none(config)
    is_split = isinstance(parsed, WgmmaConfig | MmaSyncConfig) and parsed.num_splits > 1
    return parsed.unsplit if is_split else ""


def first_accepted(implementation: str, types: Types) -> tuple[str, list[str]] | None:
    """The first config that runs the types on sizes no rule bears on, and its layouts."""
    for config in implementations()[implementation]:
        layouts = accepted_layouts(implementation, config, types)
        if layouts:
            return config, layouts
        if split_base(config):  # These come after all kernels.
            break
    return None


def accepted_layouts(implementation: str, config: str, types: Types) -> list[str]:
    """Those layouts in which the config runs the types on sizes no rule bears on."""
    return [
        layout
        for layout in LAYOUTS
        if not rejection(implementation, config, make_inputs(types, layout, PLAIN).problem)
    ]


def device() -> selection.Device:
    """The GPU, or an H200, which lets tests be collected and skipped where there is none."""
    return selection.target_device("cuda")


def choice(implementation: str, config: str, problem: Problem) -> selection.Choice:
    """What runs a problem, with the scratch memory and the kernels that it takes."""
    return selection.select(CallOptions("gpu tests", implementation, config), problem, device())


def rejection(implementation: str, config: str, problem: Problem) -> str:
    return modules.cuda.reject(implementation, config, problem.query(), device().query())


def _poison(dtype: np.dtype):
    """A value no product has: read where nothing should be, or left where a store is missing."""
    if np.issubdtype(dtype, np.integer):
        return np.iinfo(dtype).max
    return np.nan


def _draw(rng, dtype: np.dtype, shape) -> np.ndarray:
    if dtype in (np.int8, np.uint8):
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, endpoint=True)
    values = rng.integers(-2, 2, shape, endpoint=True)
    if np.issubdtype(dtype, np.complexfloating):
        values = values + 1j * rng.integers(-2, 2, shape, endpoint=True)
    return values


def _operand(draw, case: Case, dtype_name: str, rows: int, columns: int, transposed, one_for: str):
    """An operand, the flat buffer it lies in and its values; `one_for`: "", "inner" or "all"."""
    dtype = DTYPES[dtype_name]
    if transposed:
        rows, columns = columns, rows
    outer, inner = case.batch
    ld = columns + case.pad
    inner_stride = 0 if one_for else rows * ld + case.gap[1]
    outer_stride = 0 if one_for == "all" else max(rows * ld, inner * inner_stride) + case.gap[0]
    inner_held = inner if inner_stride else 1
    outer_held = outer if outer_stride else 1
    elements = 0
    if outer and inner and rows and columns:
        elements = (outer_held - 1) * outer_stride + (inner_held - 1) * inner_stride
        elements += (rows - 1) * ld + columns
    buffer = np.full(elements, _poison(dtype), dtype)
    values = np.zeros((outer, inner, rows, columns), dtype)
    if elements:
        held = np.ndarray(
            (outer_held, inner_held, rows, columns),
            dtype,
            buffer.view(np.uint8),
            strides=[s * dtype.itemsize for s in (outer_stride, inner_stride, ld, 1)],
        )
        held[...] = draw(dtype, held.shape).astype(dtype)
        values[...] = held
    values = values.reshape(outer * inner, rows, columns)
    operand = Operand(dtype_name, transposed, ld, outer_stride, inner_stride)
    return operand, buffer, values.swapaxes(1, 2) if transposed else values


def wide(values: np.ndarray) -> np.ndarray:
    """In float64 or complex128, for references."""
    is_complex = np.issubdtype(values.dtype, np.complexfloating)
    return values.astype(np.complex128 if is_complex else np.float64)


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """What one call reads, and its operands' values as matrices."""

    problem: Problem
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray  # Poison when beta == 0.
    a_values: np.ndarray
    b_values: np.ndarray

    @functools.cached_property
    def expected(self) -> np.ndarray:
        p = self.problem
        product = p.alpha * np.matmul(wide(self.a_values), wide(self.b_values))
        return product + p.beta * wide(self.c) if p.beta else product


@functools.lru_cache(maxsize=4096)
def make_inputs(types: Types, layout: str, case: Case, real: bool = False) -> Inputs:
    """Operands of small integers, or normally distributed ones when `real`."""
    rng = np.random.default_rng(list(f"{types.inputs} {layout} {case}".encode()))

    def normal(dtype, shape):
        values = rng.standard_normal(shape)
        if np.issubdtype(dtype, np.complexfloating):
            values = values + 1j * rng.standard_normal(shape)
        return values

    draw = normal if real else functools.partial(_draw, rng)
    one_for_a = {"a": "all", "a_inner": "inner"}.get(case.broadcast, "")
    one_for_b = "all" if case.broadcast == "b" else ""
    a, a_buffer, a_values = _operand(
        draw, case, types.a, case.m, case.k, layout[0] == "T", one_for_a
    )
    b, b_buffer, b_values = _operand(
        draw, case, types.b, case.k, case.n, layout[1] == "T", one_for_b
    )
    outer, inner = case.batch
    out = DTYPES[types.out]
    alpha = case.alpha
    if np.issubdtype(out, np.integer):
        alpha = np.ceil(alpha)  # Integer products are scaled by integers.
    problem = Problem(
        batch=outer * inner,
        batch_inner=inner,
        m=case.m,
        n=case.n,
        k=case.k,
        a=a,
        b=b,
        out_dtype=types.out,
        compute=types.compute,
        alpha=float(alpha),
        beta=case.beta,
    )
    shape = (outer * inner, case.m, case.n)
    c = np.full(shape, _poison(out), out)
    if case.beta:
        c = rng.integers(-2, 2, shape, endpoint=True).astype(out)
    return Inputs(problem, a_buffer, b_buffer, c, a_values, b_values)


def call(
    problem: Problem,
    a,
    b,
    c=None,
    *,
    implementation: str,
    config: str,
    in_place: bool = True,
    chosen: selection.Choice | None = None,
):
    """The FFI call. With `in_place`, D lies in C's memory (XLA copies C there if it must).

    With beta == 0 that means a D full of whatever C holds, which must not show. `chosen` runs it,
    whether it can or not.
    """
    shape = (problem.batch, problem.m, problem.n)
    result = jax.ShapeDtypeStruct(shape, DTYPES[problem.out_dtype])
    operands = (a, b) if c is None else (a, b, c)
    aliases = {2: 0} if in_place and c is not None else None
    chosen = chosen or choice(implementation, config, problem)
    return custom_call(problem, chosen, operands, [result], aliases)[0]


def run_all(
    inputs: list[Inputs],
    *,
    implementation: str,
    config: str,
    poisoned: bool = True,
    chosen: selection.Choice | None = None,
):
    """The results of all calls, made by one compiled program, in place of C.

    Unless `poisoned`, D lies in memory of its own, and C is given only where it is read. `chosen`
    is as of `call`.
    """

    def program(buffers):
        return [
            call(
                each.problem,
                *operands,
                implementation=implementation,
                config=config,
                in_place=poisoned,
                chosen=chosen,
            )
            for each, operands in zip(inputs, buffers, strict=True)
        ]

    buffers = [
        (each.a, each.b, each.c) if poisoned or each.problem.beta else (each.a, each.b)
        for each in inputs
    ]
    return jax.device_get(jax.jit(program)(jax.device_put(buffers)))


def mismatch(got: np.ndarray, inputs: Inputs) -> str:
    """What is wrong with a result of small integers; empty when it is exactly right."""
    expected = inputs.expected.astype(got.dtype)
    wrong = got != expected  # A NaN differs from everything.
    if not wrong.any():
        return ""
    first = tuple(map(int, np.argwhere(wrong)[0]))
    nans = int(np.isnan(wide(got)).sum())
    return (
        f"{inputs.problem}: {int(wrong.sum())} of {got.size} elements are wrong ({nans} NaN); "
        f"the first is {first}: got {got[first]}, expected {expected[first]}"
    )
