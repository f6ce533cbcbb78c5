"""Elementwise functions as device code: what is generated, compiled by g++, against JAX on the CPU.

JAX runs one primitive at a time, since XLA leaves out roundings and contracts products and sums
where it compiles several together. Its programs take subnormal numbers for 0, and so does the
generated code while it is compared with them; with subnormal numbers NumPy is the reference.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from elementwise_library import Library
from emulated import reason
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax

from jax_tcgemm.epilogues import (
    HEADER,
    EpilogueSource,
    InexpressibleError,
    Read,
    Reduction,
    Result,
    emit,
)
from jax_tcgemm.epilogues.expressions import STORED, computed
from jax_tcgemm.epilogues.places import Place
from jax_tcgemm.kernels import Instance, nvrtc
from jax_tcgemm.problem.activations import ACTIVATIONS

pytestmark = [
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

    def check(self, library):
        for got, (path, want) in zip(self.run(library), self.expected(), strict=True):
            want = np.asarray(want)
            if got.shape != want.shape or got.dtype != want.dtype:  # after a reduction
                got = np.asarray(jnp.asarray(got).astype(want.dtype)).reshape(want.shape)
            try:
                check(got, want, self.ulps)
            except AssertionError as error:
                error.add_note(f"result {jax.tree_util.keystr(path)}")
                raise


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


# --- functions that products end with ---------------------------------------------------------

ROW, COLUMN, MATRIX, SCALAR = SHAPE[-1:], (SHAPE[-2], 1), SHAPE[1:], ()


def hashed(seed, *indices):
    """A counter-based hash, by shifts and multiplications."""
    x = seed
    for index in indices:
        x = x ^ (index.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        x = x ^ (x >> 16)
    return x


def hash_dropout(acc, seed):
    indices = [lax.broadcasted_iota(jnp.int32, acc.shape, dim) for dim in range(acc.ndim)]
    keep = hashed(seed, *indices) < jnp.uint32(0.9 * 2**32)
    return jnp.where(keep, acc * (1 / 0.9), 0).astype(jnp.bfloat16)


def causal(acc):
    row, column = (lax.broadcasted_iota(jnp.int32, acc.shape, dim) for dim in (1, 2))
    return jnp.where(column <= row, acc, -jnp.inf)


def alibi(acc, slopes):
    row, column = jnp.arange(acc.shape[1]), jnp.arange(acc.shape[2])
    return acc + slopes[:, None, None] * (column[None, :] - row[:, None]).astype(jnp.float32)


def clipped_swiglu(gate, up, bias):
    """As of gpt-oss."""
    gate, up = jnp.minimum(gate + bias, 7.0), jnp.clip(up, -7.0, 7.0)
    return (gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)).astype(jnp.bfloat16)


def quantized(acc, scale):
    """To fp8 with a scale for each row, and largest magnitudes."""
    return (acc / scale).astype(jnp.float8_e4m3fn), jnp.max(abs(acc), axis=-1)


def requantized(acc, scale, zero):
    rounded = jnp.round(acc.astype(jnp.float32) * scale) + zero
    return jnp.clip(rounded, -128, 127).astype(jnp.int8)


@jax.custom_jvp
def scaled_tanh(x):
    return 2 * jnp.tanh(x)


@scaled_tanh.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return scaled_tanh(x), dx * (2 - scaled_tanh(x) ** 2 / 2)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, g: (g,))


def derivative(function):
    """Of the activation times a cotangent, as a backward pass has it."""

    def pulled_back(acc, z):
        return jax.vjp(function, z.astype(jnp.float32))[1](acc)[0].astype(jnp.bfloat16)

    return pulled_back


TABLE = np.linspace(-2, 2, SHAPE[-1], dtype=np.float32)

CASES = {
    "nothing": Case(lambda acc: acc),
    **{f"{x}": Case(f, ulps=8) for x, f in ACTIVATIONS.items()},
    **{
        f"{x}'": Case(derivative(f), ((SHAPE, BF16),), ulps=2, tame=True)
        for x, f in ACTIVATIONS.items()
    },
    "gelu''": Case(
        lambda acc: jax.vmap(jax.vmap(jax.vmap(jax.grad(jax.grad(jax.nn.gelu)))))(acc),
        ulps=128,
        tame=True,
    ),
    **{
        x: Case(getattr(jax.nn, x), ulps=16)
        for x in (
            *("softplus", "elu", "selu", "celu", "mish", "hard_swish", "log_sigmoid", "relu6"),
            *("soft_sign", "squareplus", "sparse_plus", "hard_tanh"),
        )
    },
    "bias, relu": Case(lambda acc, bias: jax.nn.relu(acc + bias), ((ROW, BF16),)),
    "bias along m": Case(lambda acc, bias: acc + bias, ((COLUMN, F16),)),
    "alpha, beta, residual": Case(
        lambda acc, c: (1.5 * acc + 0.25 * c.astype(jnp.float32)).astype(jnp.bfloat16),
        ((SHAPE, BF16),),
    ),
    "roundings in between": Case(
        lambda acc, b, c: (acc.astype(jnp.bfloat16) + b) * c - b,
        ((ROW, BF16), (MATRIX, BF16)),
    ),
    "swiglu": Case(lambda g, u: jax.nn.silu(g) * u, accumulators=(F32, F32), ulps=8),
    "geglu to two results": Case(
        lambda g, u: (jax.nn.gelu(g) * u, g.astype(jnp.bfloat16), u.astype(jnp.float16)),
        accumulators=(F32, F32),
        ulps=8,
    ),
    "clipped swiglu": Case(clipped_swiglu, ((ROW, BF16),), (F32, F32), ulps=2),
    "soft cap": Case(lambda acc: 30 * jnp.tanh(acc / 30), ulps=8),
    "swish with slopes": Case(
        lambda acc, slope: acc * jax.nn.sigmoid(slope * acc), ((ROW, F32),), ulps=8
    ),
    "dropout by a hash": Case(hash_dropout, ((SCALAR, U32),)),
    "dropout of jax.random": Case(
        lambda acc, key: jnp.where(jax.random.bernoulli(key, 0.9, acc.shape), acc / 0.9, 0),
        (None,),
        ulps=1.5,  # XLA multiplies by the rounded reciprocal
    ),
    "random numbers": Case(
        lambda acc, key: (
            acc + jax.random.normal(jax.random.fold_in(key, 3), acc.shape),
            jax.random.bits(jax.random.split(key, 3)[1], acc.shape, jnp.uint8),
            jax.random.bits(jax.random.key(5), acc.shape, jnp.uint64),
            jax.vmap(lambda k: jax.random.uniform(k, acc.shape[1:]))(
                jax.random.split(jax.random.wrap_key_data(jax.random.key_data(key)), 3)
            ),
        ),
        (None,),
        ulps=16,
        tame=True,
    ),
    "causal mask": Case(causal),
    "alibi": Case(alibi, ((SHAPE[:1], F32),)),
    "fp8 quantiser": Case(quantized, ((COLUMN, F32),)),
    "e5m2 quantiser": Case(
        lambda acc, scale: (acc * scale).astype(jnp.float8_e5m2), ((SCALAR, F32),)
    ),
    "int8 requantiser": Case(requantized, ((ROW, F32), (SCALAR, F32)), (I32,)),
    "int32 sums": Case(lambda acc, x: (acc * 3 - x) // 7 + acc % 5, ((ROW, np.int16),), (I32,)),
    "float64": Case(lambda acc, x: acc * x - jnp.sqrt(abs(x)), ((ROW, F64),), (F64,)),
    "nested jit": Case(jax.jit(lambda acc: jax.jit(jnp.sqrt)(acc) + jax.jit(lambda x: 2 * x)(acc))),
    "custom_jvp": Case(scaled_tanh, ulps=8),
    "derivative of custom_jvp": Case(
        lambda acc, g: jax.vjp(scaled_tanh, acc)[1](g)[0], ((SHAPE, F32),), ulps=64, tame=True
    ),
    "custom_vjp": Case(straight_through),
    "derivative of custom_vjp": Case(
        lambda acc, g: jax.vjp(straight_through, acc)[1](g)[0], ((SHAPE, F32),)
    ),
    "remat": Case(
        lambda acc: jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda y: jnp.sin(y) * y)(x)))(acc),
        ulps=32,
        tame=True,
    ),
    "stop_gradient": Case(lambda acc: acc + lax.stop_gradient(abs(acc))),
    "cond": Case(
        lambda acc, x: lax.cond(x[0] > 0, lambda y: (y, -y), lambda y: (2 * y, y), acc),
        ((ROW, BF16),),
    ),
    "switch": Case(
        lambda acc, i: lax.switch(i, [lambda y: y, lambda y: -y, lambda y: 2 * y], acc),
        ((SCALAR, I32),),
    ),
    "sums": Case(
        lambda acc, b: (acc.astype(jnp.bfloat16), jnp.sum(acc + b, 1), jnp.sum(acc, (0, 1))),
        ((ROW, BF16),),
        ulps=64,
        tame=True,
    ),
    "sums of bf16": Case(
        lambda acc: jnp.sum(acc.astype(jnp.bfloat16), -1, keepdims=True), ulps=2, tame=True
    ),
    "maxima": Case(
        lambda acc: (
            jnp.max(acc, -1),
            jnp.min(acc, 1, keepdims=True),
            jnp.max(acc.astype(jnp.float16), 0),
        )
    ),
    "closed-over arrays": Case(
        lambda acc, b: acc * TABLE + jnp.asarray(TABLE)[::-1] + b * np.float32(2), ((ROW, BF16),)
    ),
    "both ways": Case(lambda acc, w: acc * w + w.T, (((8, 8), F32),), shape=(3, 8, 8)),
    "slices": Case(
        lambda acc, b, c: (
            acc
            + b[: acc.shape[2]] * b[acc.shape[2] :]
            + c[1, :, None] * b[3]
            + jnp.split(b, 2)[1]
            + b[1::2]
        ),
        (((2 * SHAPE[2],), F32), ((4, SHAPE[1]), F32)),
    ),
    "reversed": Case(lambda acc, b: acc + b[:, ::-1] - jnp.flip(b), ((MATRIX, F32),)),
    "transposed": Case(lambda acc, x: acc + jnp.transpose(x, (2, 0, 1)), (((6, 20, 3), F16),)),
    "reshapes": Case(
        lambda acc, x, y: (
            jnp.reshape(jnp.reshape(acc, (18, 20)) + x.reshape(18, 20), acc.shape)
            + y[None].squeeze(0).reshape(6, 1, 20, 1)[..., 0].swapaxes(0, 1)
        ),
        (((3, 120), F32), ((6, 20), F32)),
    ),
    "one row": Case(lambda acc, b, s: (acc + b) * s, (((20,), F32), ((1, 1), F32)), shape=(1, 20)),
    "one column": Case(
        lambda acc, b, s: (acc + b) * s.T, (((1,), F32), ((1, 20), F32)), shape=(20, 1)
    ),
    "indices of slices": Case(
        lambda acc: acc + jnp.arange(100, dtype=jnp.float32)[5:85:4] - jnp.arange(20)[::-1]
    ),
    "many equations": Case(
        lambda acc: functools.reduce(lambda x, i: x * 0.5 + i, range(1500), acc)
    ),
}
library, each_case = checked(CASES)


@needs_compiler
@each_case
def test_each_function_is_that_of_jax(name, library):
    CASES[name].check(library)


@needs_compiler
def test_without_64_bit_types(tmp_path):
    def function(acc, bias):
        bits = jax.random.bits(jax.random.key(3), acc.shape)
        masked = jnp.where(jnp.arange(20) <= jnp.arange(6)[:, None], acc + bias, -1)
        return masked, bits, bits.astype(jnp.float16)

    with jax.enable_x64(False):
        case = Case(function, ((ROW, F16),))
        assert [result.dtype for result in case.source.results] == [F32, U32, F16]
        case.check(Library(tmp_path, [case.source]))


# --- primitives -----------------------------------------------------------------------------------

COMPARISONS = {x: getattr(lax, x) for x in ("eq", "ne", "lt", "le", "gt", "ge")}


def float_primitives(acc, x, y, z):
    """Those that round once at most."""
    found = {name: f(x, y) for name, f in COMPARISONS.items()}
    for f in (lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.min, lax.rem):
        found[f.__name__] = f(x, y)
    for f in (lax.neg, lax.abs, lax.sign, lax.floor, lax.ceil, lax.is_finite, lax.sqrt, lax.square):
        found[f.__name__] = f(x)
    for method in lax.RoundingMethod:
        found[method.name] = lax.round(x, method)
    for power in (-2, -1, 0, 1, 2, 3, 7):
        found[f"power {power}"] = lax.integer_pow(x, power)
    for bits in ((8, 7), (5, 10), (4, 3), (3, 4), (8, 23)):
        found[f"reduce_precision {bits}"] = lax.reduce_precision(x, *bits)
    if x.dtype.itemsize > 1:
        found["nextafter"] = lax.nextafter(x, y)
    found["clamp"] = lax.clamp(x, y, z)
    found["clamp by scalars"] = lax.clamp(jnp.asarray(-1, x.dtype), y, jnp.asarray(2.5, x.dtype))
    found["select"] = lax.select(acc > 0, x, y)
    found["select_n"] = lax.select_n(jnp.clip(acc, 0, 2), x, y, z)
    bits = {1: jnp.uint8, 2: jnp.int16, 4: jnp.uint32, 8: jnp.int64}[x.dtype.itemsize]
    found["bits"] = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), 0, x), bits)
    return found


def integer_primitives(acc, x, y, z):
    found = {name: f(x, y) for name, f in COMPARISONS.items()}
    for f in (lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min):
        found[f.__name__] = f(x, y)
    for f in (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor):
        found[f.__name__] = f(x, y)
    for f in (lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic):
        found[f.__name__] = f(x, y)
        found[f"{f.__name__} by few"] = f(x, y & 7)
    for f in (lax.neg, lax.abs, lax.sign, lax.bitwise_not, lax.clz, lax.population_count):
        if f not in (lax.neg, lax.abs) or x.dtype.kind == "i":
            found[f.__name__] = f(x)
    found["power"] = lax.integer_pow(x, 5)
    found["clamp"] = lax.clamp(x, y, z)
    found["select"] = lax.select(acc > 0, x, y)
    found["constants"] = x * 3 - jnp.asarray(jnp.iinfo(x.dtype).min, x.dtype) + 7
    if x.dtype.kind == "u":
        bits = {1: jnp.float8_e5m2, 2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}
        found["float"] = lax.bitcast_convert_type(x, bits[x.dtype.itemsize])
    return found


def boolean_primitives(acc, x, y, z):
    found = {name: f(x, y) for name, f in COMPARISONS.items()}
    for f in (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.max, lax.min):
        found[f.__name__] = f(x, y)
    found["not"] = lax.bitwise_not(x)
    found["select"] = lax.select(z, x, y)
    found["constants"] = lax.select(z, jnp.full_like(x, True), jnp.zeros_like(x))
    return found


def conversions(acc, x):
    return {str(dtype): x.astype(dtype) for dtype in STORED}


def primitives(dtype):
    if dtype == BOOL:
        return boolean_primitives
    return float_primitives if is_float(dtype) else integer_primitives


LARGE = (24, 40)
PRIMITIVES = {
    **{
        f"{dtype}": Case(primitives(dtype), ((LARGE, dtype),) * 3, (I32,), LARGE, at_once=True)
        for dtype in STORED
    },
    **{
        f"conversions of {dtype}": Case(conversions, ((LARGE, dtype),), shape=LARGE, at_once=True)
        for dtype in STORED
    },
}
primitive_library, each_primitive = checked(PRIMITIVES)


@needs_compiler
@each_primitive
def test_each_primitive_is_that_of_jax(name, primitive_library):
    PRIMITIVES[name].check(primitive_library)


# --- functions of floats --------------------------------------------------------------------------

# Each with its exact values, and the numbers that it is given: any positive ones where None.
FUNCTIONS = {
    "exp": (lax.exp, np.exp, (-87, 88)),
    "exp2": (lax.exp2, np.exp2, (-126, 127)),
    "expm1": (lax.expm1, np.expm1, (-87, 88)),
    "log": (lax.log, np.log, None),
    "log1p": (lax.log1p, np.log1p, None),
    "log2": (jnp.log2, np.log2, None),
    "tanh": (lax.tanh, np.tanh, (-20, 20)),
    "logistic": (lax.logistic, lambda x: 1 / (1 + np.exp(-x)), (-87, 87)),
    "sin": (lax.sin, np.sin, (-1e4, 1e4)),
    "cos": (lax.cos, np.cos, (-1e4, 1e4)),
    "tan": (lax.tan, np.tan, (-1e4, 1e4)),
    "asin": (lax.asin, np.arcsin, (-1, 1)),
    "acos": (lax.acos, np.arccos, (-1, 1)),
    "atan": (lax.atan, np.arctan, (-1e4, 1e4)),
    "sinh": (lax.sinh, np.sinh, (-87, 87)),
    "cosh": (lax.cosh, np.cosh, (-87, 87)),
    "asinh": (lax.asinh, np.arcsinh, (-1e6, 1e6)),
    "acosh": (lax.acosh, np.arccosh, (1, 1e6)),
    "atanh": (lax.atanh, np.arctanh, (-1, 1)),
    "sqrt": (lax.sqrt, np.sqrt, None),
    "rsqrt": (lax.rsqrt, lambda x: 1 / np.sqrt(x), None),
    "cbrt": (lax.cbrt, np.cbrt, (-1e30, 1e30)),
    "erf": (lax.erf, scipy.special.erf, (-6, 6)),
    "erfc": (lax.erfc, scipy.special.erfc, (-6, 9)),
    "erf_inv": (lax.erf_inv, scipy.special.erfinv, (-1, 1)),
    "lgamma": (lax.lgamma, scipy.special.gammaln, (0.1, 1e6)),
}
BINARY_FUNCTIONS = {
    "pow": (lambda x, y: lax.pow(abs(x), y), lambda x, y: abs(x) ** y, (-9, 9)),
    "atan2": (lax.atan2, np.arctan2, (-9, 9)),
}
NUM_SAMPLES = 4000
FUNCTION_CASES = {
    f"{name} {dtype}": Case(f, accumulators=(dtype,) * operands, shape=(NUM_SAMPLES,))
    for table, operands in ((FUNCTIONS, 1), (BINARY_FUNCTIONS, 2))
    for name, (f, _, _) in table.items()
    for dtype in (F32, F64)
} | {
    # With special numbers; rounded, two results that are a little apart are mostly the same.
    f"{name} {dtype}": Case(f, accumulators=(dtype,) * operands, ulps=1.01, at_once=True)
    for table, operands in ((FUNCTIONS, 1), (BINARY_FUNCTIONS, 2))
    for name, (f, _, _) in table.items()
    for dtype in (F16, BF16)
    if name != "exp2"  # of which JAX rounds the exponent times log(2), too
}
function_library, each_function = checked(FUNCTION_CASES)


def samples(rng, domain, dtype):
    """Half of them evenly spread, half on a logarithmic scale towards 0."""
    size = NUM_SAMPLES
    if domain is None:
        return np.exp(rng.uniform(-60, 60, size)).astype(dtype)
    low, high = domain
    evenly = rng.uniform(low, high, size)
    small = np.sign(evenly) * max(abs(low), abs(high)) * np.exp(rng.uniform(-25, 0, size))
    is_small = (rng.random(size) < 0.5) & (small > low) & (small < high)
    return np.where(is_small, small, evenly).astype(dtype)


def units_off(got, exact):
    """The largest error, in units of the last place."""
    nearest = exact.astype(got.dtype)
    normal = np.isfinite(nearest) & (abs(nearest) > np.finfo(got.dtype).tiny)
    error = abs(got.astype(np.longdouble) - exact)
    return float((error / np.spacing(abs(nearest)))[normal].max())


@needs_compiler
@each_function
def test_each_function_is_as_accurate_as_that_of_jax(name, function_library):
    """With the functions of the C library here, and on a GPU with those of CUDA."""
    case, (function, dtype) = FUNCTION_CASES[name], name.split()
    if case.accumulators[0].itemsize == 2:
        case.check(function_library)
        return
    f, exact, domain = (FUNCTIONS | BINARY_FUNCTIONS)[function]
    rng = np.random.default_rng(0)
    numbers = [samples(rng, domain, dtype) for _ in case.accumulators]
    if function in _OF_SCIPY and dtype == "float64":
        return  # Nothing here has these values to more places.
    exact = exact(
        *(x.astype(np.float64 if function in _OF_SCIPY else np.longdouble) for x in numbers)
    )
    theirs = units_off(np.asarray(f(*map(jnp.asarray, numbers))), np.asarray(exact, np.longdouble))
    got = units_off(
        *function_library.run(case.source, numbers, ()), np.asarray(exact, np.longdouble)
    )
    assert got <= max(theirs, _UNITS_OFF.get(function, 1)) + 0.01


_OF_SCIPY = ("erf", "erfc", "erf_inv", "lgamma")
# log2 is a quotient of logarithms: half a unit of one may be a whole unit of the quotient.
_UNITS_OFF = {"lgamma": 2, "log2": 1.5}


# --- subnormal numbers ----------------------------------------------------------------------------

SUBNORMAL = Case(
    lambda x, y: {
        "sum": x + y,
        "difference": x - y,
        "product": x * y,
        "half": x * np.float32(0.5),
        "quotient": x / y,
        "root": jnp.sqrt(abs(x)),
        "maximum": jnp.maximum(x, y),
        "minimum": jnp.minimum(x, y),
        "negative": -x,
        **{str(dtype): x.astype(dtype) for dtype in (F16, BF16, E4M3, E5M2, F64)},
        "sum of halves": x.astype(jnp.float16) + y.astype(jnp.float16),
        "next": lax.nextafter(x, y),
        "scaled bits": lax.bitcast_convert_type(x, jnp.int32) + 1,
    },
    accumulators=(F32, F32),
    shape=(4096,),
)


@needs_compiler
def test_subnormal_numbers_are_kept(tmp_path):
    rng = np.random.default_rng(0)
    exponents = rng.choice([-149, -140, -133, -127, -126, -24, -16, -14, -10, -9, -6], 4096)
    x, y = (np.ldexp(rng.uniform(-2, 2, 4096).astype("f"), exponents) for _ in range(2))
    x[x == 0] = 1  # NumPy takes either zero for the larger one.
    with np.errstate(all="ignore"):
        half = np.float16
        expected = {
            "sum": x + y,
            "difference": x - y,
            "product": x * y,
            "half": x * np.float32(0.5),
            "quotient": x / y,
            "root": np.sqrt(abs(x)),
            "maximum": np.maximum(x, y),
            "minimum": np.minimum(x, y),
            "negative": -x,
            **{str(dtype): x.astype(dtype) for dtype in (F16, BF16, E4M3, E5M2, F64)},
            "sum of halves": x.astype(half) + y.astype(half),
            "next": np.nextafter(x, y),
            "scaled bits": x.view(np.int32) + 1,
        }
    got = Library(tmp_path, [SUBNORMAL.source]).run(SUBNORMAL.source, (x, y), ())
    for name, array in zip(sorted(expected), got, strict=True):
        bits = f"u{array.itemsize}"
        np.testing.assert_array_equal(array.view(bits), expected[name].view(bits), name)


def nearest(x, dtype):
    """As XLA rounds: float64 to 8 bits at once, to 16 bits by way of float32."""
    if x.dtype == F64 and dtype.itemsize == 1:
        return np.asarray(jnp.asarray(x).astype(dtype))
    return x.astype(np.float32).astype(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", [F16, BF16, E4M3, E5M2], ids=str)
def test_every_rounding_and_the_ties_between(dtype, tmp_path):
    """All numbers of the dtype, the middles between them, and what is a little beside these."""
    every = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)
    every = np.sort(every.astype(np.float64)[np.isfinite(every.astype(np.float64))])
    middles = (every[1:] + every[:-1]) / 2
    beyond = every[-1] + (every[-1] - every[-2]) / 2
    numbers = np.concatenate([every, middles, [beyond, -beyond, np.inf, -np.inf, np.nan]])
    numbers = np.concatenate([numbers * scale for scale in (1, 1 + 2.0**-40, 1 - 2.0**-40)])
    for own in (F32, F64):
        with np.errstate(invalid="ignore"):
            x = numbers.astype(own)
        case = Case(lambda x: x.astype(dtype), accumulators=(own,), shape=x.shape)
        (got,) = Library(tmp_path, [case.source]).run(case.source, [x], ())
        with np.errstate(all="ignore"):
            want = nearest(x, dtype)
        is_number = ~np.isnan(want.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), ~is_number)
        bits = f"u{dtype.itemsize}"
        np.testing.assert_array_equal(got[is_number].view(bits), want[is_number].view(bits))


# --- random functions -----------------------------------------------------------------------------

TREE_DTYPES = (*FLOATS, E4M3, E5M2, *INTEGERS, BOOL)
# How an operand lies along the result.
TREE_LAYOUTS = {
    "whole": lambda x: x,
    "matrix": lambda x: x[0],
    "row": lambda x: x[0, 0],
    "column": lambda x: x[0, :, :1],
    "batch": lambda x: x[:, :1, :1],
    "scalar": lambda x: x[0, 0, 0],
    "reversed": lambda x: x[:, ::-1],
    "transposed": lambda x: x[0, :, :3].T[:, :, None],
    "reshaped": lambda x: x.reshape(18, 20).reshape(3, 6, 20),
}
OF_FLOATS = ("neg", "abs", "sign", "floor", "ceil", "sqrt", "square")
OF_TWO_FLOATS = ("add", "sub", "mul", "div", "max", "min", "rem")
OF_INTEGERS = ("bitwise_not", "population_count", "clz", "sign", "square")
OF_TWO_INTEGERS = (
    *("add", "sub", "mul", "div", "max", "min", "rem"),
    *("bitwise_and", "bitwise_or", "bitwise_xor"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic"),
)
OF_TWO_BOOLS = ("bitwise_and", "bitwise_or", "bitwise_xor", "max", "min")


@st.composite
def trees(draw, dtype=None, depth=5):
    """A function of operands, one of each dtype, that rounds once in each primitive."""
    dtype = draw(st.sampled_from(TREE_DTYPES)) if dtype is None else dtype
    below = functools.partial(trees, depth=depth - 1)
    kind = draw(
        st.sampled_from(
            ("leaf",) if not depth else ("leaf", "one", "two", "two", "other", "convert")
        )
    )
    if kind == "leaf":
        leaf = draw(st.sampled_from(("operand", "operand", "constant", "index")))
        if leaf == "constant":
            number = draw(st.sampled_from(list(special(dtype))))
            # Scalars JAX converts by itself, and not as XLA does.
            return lambda *operands: jnp.full(SHAPE, number)
        if leaf == "index" and dtype != BOOL:
            dim = draw(st.integers(0, 2))
            return lambda *operands: lax.broadcasted_iota(dtype, SHAPE, dim)
        place, layout = TREE_DTYPES.index(dtype), draw(st.sampled_from(list(TREE_LAYOUTS)))
        return lambda *operands: TREE_LAYOUTS[layout](operands[place])
    if kind == "one":
        x = draw(below(dtype))
        names = OF_FLOATS if is_float(dtype) else OF_INTEGERS if dtype != BOOL else ("bitwise_not",)
        f = getattr(lax, draw(st.sampled_from(names)))
        return lambda *operands: f(x(*operands))
    if kind == "two":
        x, y = draw(below(dtype)), draw(below(dtype))
        names = OF_TWO_FLOATS if is_float(dtype) else OF_TWO_INTEGERS
        f = getattr(lax, draw(st.sampled_from(OF_TWO_BOOLS if dtype == BOOL else names)))
        return lambda *operands: f(*alike(x(*operands), y(*operands)))
    if kind == "convert":
        x = draw(below())
        return lambda *operands: lax.convert_element_type(x(*operands), dtype)
    if dtype == BOOL:
        of = draw(st.sampled_from(TREE_DTYPES))
        x, y = draw(below(of)), draw(below(of))
        compare = COMPARISONS[draw(st.sampled_from(list(COMPARISONS)))]
        return lambda *operands: compare(*alike(x(*operands), y(*operands)))
    which, x, y = draw(below(BOOL)), draw(below(dtype)), draw(below(dtype))
    if draw(st.booleans()):
        return lambda *operands: jnp.where(which(*operands), x(*operands), y(*operands))
    z = draw(below(dtype))
    return lambda *operands: lax.clamp(*alike(x(*operands), y(*operands), z(*operands)))


def alike(*arrays):
    """Broadcast to one shape of the same rank."""
    return jnp.broadcast_arrays(*arrays)


@needs_compiler
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # each example is many functions, compiled together
    suppress_health_check=list(HealthCheck),
)
@given(functions=st.lists(trees(), min_size=15, max_size=15))
def test_random_functions_are_those_of_jax(functions, tmp_path_factory):
    operands = tuple((SHAPE, dtype) for dtype in TREE_DTYPES)
    with jax.enable_x64(True):
        cases = [
            Case(lambda acc, *x, f=f: jnp.broadcast_to(f(*x), acc.shape), operands)
            for f in functions
        ]
        library = Library(tmp_path_factory.mktemp("trees"), [case.source for case in cases])
        for case in cases:
            try:
                case.check(library)
            except AssertionError as error:
                error.add_note(str(case.source))
                raise


# --- what is generated ----------------------------------------------------------------------------

ACC = jax.ShapeDtypeStruct(SHAPE, F32)


def emitted(function, *operands, num_accumulators=1):
    return emit(jax.make_jaxpr(function)(ACC, *operands), num_accumulators)


def test_the_text():
    bias = jax.ShapeDtypeStruct((20,), BF16)

    def function(acc, bias):
        z = acc + bias
        masked = jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, 2) < 7, z, -jnp.inf)
        return (z**3).astype(jnp.bfloat16), jnp.max(masked, axis=2)

    source, constants = emitted(function, bias)
    assert constants == ()
    assert str(source) == (
        """\
// acc0: float32
// x0: operand 0, bfloat16 along (2,)
// y0: bfloat16
// y1: float32, its max over (2,)
struct Epilogue {
  template <typename Index>
  static __device__ __forceinline__ void apply(
      const float acc0, const __nv_bfloat16 x0, const Index& at, float& y0, float& y1) {
    const float v0 = wide(x0);
    const float v1 = acc0 + v0;
    const float v2 = v1 * v1;  // integer_pow
    const float v3 = v1 * v2;  // integer_pow
    y0 = v3;
    const int32_t v4 = at[2];
    const bool v5 = v4 < 7;
    const float v6 = v5 ? v1 : -infinity<float>();
    y1 = v6;
  }
};
"""
    )
    assert source.accumulators == (F32,)
    assert source.reads == (Read(0, BF16, (Place(0, (0, 0, 1)),)),)
    assert source.results == (Result(BF16), Result(F32, Reduction("max", (2,))))
    assert source.index_dimensions == (2,)
    assert source.definitions.startswith("namespace tcgemm::elementwise {\n\nstruct Epilogue {\n")


def test_functions_that_trace_alike_have_equal_sources():
    bias = jax.ShapeDtypeStruct((20,), BF16)

    def first(acc, bias):
        return jax.nn.relu(acc + bias) * 2

    @jax.jit
    def second(sums, offset):
        positive = jax.nn.relu(sums + offset)
        return positive * 2

    (a, _), (b, _) = emitted(first, bias), emitted(second, bias)
    assert a == b
    assert hash(a) == hash(b)
    for other in (
        emitted(lambda acc, bias: jax.nn.relu(acc + bias) * 3, bias),
        emitted(first, jax.ShapeDtypeStruct((20,), F16)),
        emitted(first, jax.ShapeDtypeStruct((6, 1), BF16)),
        emitted(lambda acc, bias: jnp.sum(first(acc, bias), 0), bias),
    ):
        assert other[0] != a


def test_extents_are_no_part_of_the_code():
    sources = [
        emit(jax.make_jaxpr(lambda acc, b, c: jax.nn.gelu(acc + b[:, None]) * c)(acc, b, c))[0]
        for m, n in ((8, 16), (128, 999))
        for acc, b, c in [[jax.ShapeDtypeStruct(shape, F32) for shape in ((m, n), (m,), (n,))]]
    ]
    assert sources[0] == sources[1]


def test_arrays_that_are_closed_over_become_operands():
    row, column = jnp.arange(20.0, dtype=F32), np.ones((6, 1), BF16)
    bias = jax.ShapeDtypeStruct((20,), BF16)
    source, constants = emitted(lambda acc, bias: acc * row + row[::-1] + column * bias, bias)
    for constant, array in zip(constants, (row, column), strict=True):
        np.testing.assert_array_equal(constant, array)
    assert [read.operand for read in source.reads] == [1, 1, 2, 0]
    assert [read.strides((20,), 3) for read in source.reads[:2]] == [
        (0, (0, 0, 1)),
        (19, (0, 0, -1)),
    ]
    # What is known of tracers is their type, so they are operands even as scalars.
    found = []

    def outer(scale):
        found.append(emitted(lambda acc: acc * scale))
        return scale

    jax.jit(outer)(2.0)
    ((source, (scale,)),) = found
    assert source.reads == (Read(0, F64, ()),)
    assert isinstance(scale, jax.core.Tracer)


def test_what_no_result_needs_is_left_out():
    source, _ = emitted(lambda acc, x: (jnp.cumsum(acc), jnp.tanh(x), acc)[2], ACC)
    assert source.struct.count(";") == 2
    assert source.reads == ()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda acc: jnp.cumsum(acc, 1),
            r"cumsum\(float32\[3,6,20\]\) at .*test_element.*:\d+ must",
        ),
        (
            lambda acc: acc @ jnp.ones((20, 20)),
            r"dot_general\(float32\[3,6,20\], .* must be elemen",
        ),
        (lambda acc: acc[:, ::-1] + acc, "accumulator 0 must be used at the element that is comp"),
        (jax.nn.softmax, r"reduce_max\(.* must be a result, with nothing computed from it"),
        (lambda acc: jnp.mean(acc, 2), r"div\(float32\[3,6\], float32\[\]\) .*, which result 0 is"),
        (lambda acc: jnp.argmax(acc, 2), r"argmax\(.*, which result 0 is, must be of shape \(3, 6"),
        (lambda acc: (acc, jnp.ones(4)), r"result 1.* must be of shape .*, got shape \(4,\)"),
        (lambda acc: acc + 1j, r"must be of dtypes that kernels have, got complex64"),
        (lambda acc: acc.astype(jnp.int4), r"convert_element_type.* got int4"),
        (lambda acc: lax.digamma(acc), "digamma"),
        (lambda acc: lax.nextafter(*[acc.astype(jnp.float8_e5m2)] * 2), "must be of 16 bits or mo"),
        (lambda acc: acc.reshape(18, 20).T.reshape(3, 6, 20) * acc, "a reshape from .* must leave"),
        (lambda acc: acc + jax.random.uniform(jax.random.key(0, impl="rbg"), acc.shape), "random_"),
        (lambda acc: lax.fori_loop(0, 3, lambda i, x: x * 2, acc), r"(scan|while)\("),
        (
            lambda acc: (jax.debug.callback(lambda x: None, acc), acc)[1],
            r"debug_callback\(.* must have no effects",
        ),
    ],
)
def test_what_cannot_be_expressed_is_named(function, message):
    with pytest.raises(InexpressibleError, match=message):
        emitted(function)


def test_random_numbers_of_older_generators_are_named():
    with jax.threefry_partitionable(False), pytest.raises(InexpressibleError, match="random_bits"):
        emitted(lambda acc, key: jax.random.uniform(key, acc.shape), jax.random.key(0))


def test_accumulators_of_several_shapes_are_an_error():
    with pytest.raises(ValueError, match="accumulators must be of one shape, got"):
        emitted(lambda acc, up: acc, jax.ShapeDtypeStruct((20,), F32), num_accumulators=2)


# --- mistakes are found ---------------------------------------------------------------------------

MISTAKEN = Case(
    lambda acc, w, b: (acc + w.astype(jnp.float32)) * b - 1.5, ((MATRIX, F16), (COLUMN, F32))
)


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        None,
        ("acc0 + v0", "acc0 - v0"),
        ("v1 * x1", "v1 * acc0"),
        ("- 1.5f", "- 1.4999999f"),
        ("strides[1 + dim] * at[dim]", "strides[1 + dim] * at[dim ? 3 - dim : 0] % 6"),
        ("wide(x0)", "rounded<__nv_bfloat16>(wide(x0))"),
    ],
    ids=["none", "operator", "operand", "constant", "stride", "rounding"],
)
def test_mistakes_are_found(change, tmp_path):
    library = Library(tmp_path, [MISTAKEN.source], change or ("", ""))
    if change is None:
        MISTAKEN.check(library)
        return
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        MISTAKEN.check(library)


@needs_compiler
def test_a_wrong_stride_is_found(tmp_path):
    case = Case(lambda acc, w: acc + w, (((8, 8), F32),), shape=(3, 8, 8))
    (read,) = case.source.reads
    wrong = dataclasses.replace(read, places=read.places[::-1])
    accumulators, operands = case.arguments
    library = Library(tmp_path, [case.source])
    case.check(library)
    (got,) = library.run(case.source, accumulators, operands, reads=(wrong,))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check(got, *(want for _, want in case.expected()))


# --- NVRTC ----------------------------------------------------------------------------------------


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


@needs_nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("cases", [CASES, PRIMITIVES, FUNCTION_CASES], ids=["all", "each", "math"])
def test_all_functions_compile_for_gpus(cases, target):
    sources = dict.fromkeys(case.source for case in cases.values())
    compiled = nvrtc.compile_kernel(kernel(sources, target))
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.faults == ()
