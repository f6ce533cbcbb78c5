"""Functions as products end with as device code, against JAX on the CPU, and what is generated."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elementwise_cases import (
    BF16,
    F16,
    F32,
    F64,
    I32,
    SHAPE,
    U32,
    Case,
    check,
    checked,
    compiles,
    needs_compiler,
    needs_nvrtc,
    of_elements,
)
from elementwise_library import Library
from jax import lax

from jax_tcgemm.epilogues import InexpressibleError, Read, Reduction, Result, emit
from jax_tcgemm.epilogues.code.places import Place
from jax_tcgemm.problem.activations import ACTIVATIONS

pytestmark = of_elements

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
    "fp8 quantizer": Case(quantized, ((COLUMN, F32),)),
    "e5m2 quantizer": Case(
        lambda acc, scale: (acc * scale).astype(jnp.float8_e5m2), ((SCALAR, F32),)
    ),
    "int8 requantizer": Case(requantized, ((ROW, F32), (SCALAR, F32)), (I32,)),
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


@needs_nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_all_functions_compile_for_gpus(target):
    compiles(CASES, target)
