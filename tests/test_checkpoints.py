"""Loaders of packed weights: bit for bit what each format says, on checkpoints written here."""

import functools
import json
import re
import types

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from packed_cases import dequantize, unpack

import jax_tcgemm

K, N, GROUP = 256, 48, 64
RNG = np.random.default_rng(0)
F16 = RNG.uniform(0.01, 0.1, (K // GROUP, N)).astype(np.float16)


def words_of(fields, bits, axis):
    """Fields packed in int32, the lowest bits first, one after the other along an axis."""
    per_word = 32 // bits
    fields = np.moveaxis(np.asarray(fields, np.uint32), axis, -1)
    fields = fields.reshape(*fields.shape[:-1], -1, per_word)
    words = np.zeros(fields.shape[:-1], np.uint32)
    for i in range(per_word):
        words |= fields[..., i] << np.uint32(bits * i)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def gptq_zeros(zero, bits):
    """Zero points of GPTQ's first format: of each word 1 is subtracted in every field at once."""
    ones = {4: 0x11111111, 8: 0x01010101}[bits]
    return (words_of(zero, bits, 1).view(np.uint32) - np.uint32(ones)).view(np.int32)


def awq_words(fields):
    """Nibbles of AWQ's words, in its order of columns."""
    fields = fields.reshape(len(fields), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
    return words_of(fields.reshape(len(fields), -1), 4, 1)


def check(w, q, zero, scale, g_idx=None):
    """The same integers less zero points, and the same scales, at every place."""
    unpacked = unpack(w)
    got_zero = np.zeros(scale.shape, int)
    if unpacked.zero_point is not None:
        got_zero = np.asarray(unpacked.zero_point, int)
    rows = np.arange(len(q)) // (len(q) // len(scale)) if g_idx is None else g_idx
    own = rows if unpacked.g_idx is None else np.asarray(unpacked.g_idx)
    np.testing.assert_array_equal(own, rows)
    difference = np.asarray(unpacked.q, int) - got_zero[rows]
    np.testing.assert_array_equal(difference, q.astype(int) - np.asarray(zero, int)[rows])
    assert unpacked.scale.dtype == scale.dtype
    np.testing.assert_array_equal(np.asarray(unpacked.scale), scale)


@pytest.fixture(params=["dictionary", "file"])
def source(request, tmp_path):
    """What makes a loader's source of a dictionary of arrays."""
    if request.param == "dictionary":
        return lambda tensors: tensors
    flax = pytest.importorskip("safetensors.flax")

    def write(tensors):
        path = tmp_path / "model.safetensors"
        flax.save_file({name: jnp.asarray(x) for name, x in tensors.items()}, str(path))
        return path

    return write


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", ["none", "sorted", "act-order"])
def test_gptq(source, bits, order):
    q, zero = RNG.integers(0, 2**bits, (K, N)), RNG.integers(0, 2**bits, (K // GROUP, N))
    tensors = {
        "a.qweight": words_of(q, bits, 0),
        "a.qzeros": gptq_zeros(zero, bits),
        "a.scales": F16,
    }
    g_idx = np.arange(K, dtype=np.int32) // GROUP
    if order == "act-order":
        g_idx = RNG.permutation(g_idx)
    if order != "none":
        tensors["a.g_idx"] = g_idx
    w = jax_tcgemm.from_gptq(source(tensors), "a.", bits=bits)
    check(w, q, zero, F16, g_idx)
    assert (w.order is not None) == (order == "act-order")
    tensors["a.qzeros"] = words_of(zero, bits, 1)
    v2 = jax_tcgemm.from_gptq(source(tensors), "a.", bits=bits, zero_offset=0)
    check(v2, q, zero, F16, g_idx)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_0_in_gptq_borrows_from_its_neighbor(bits):
    zero = np.tile([0, 5, 0, 0, 8, 1, 2**bits - 1, 3], (K // GROUP, N // 8))
    tensors = {
        "qweight": words_of(RNG.integers(0, 2**bits, (K, N)), bits, 0),
        "qzeros": gptq_zeros(zero, bits),
        "scales": F16,
    }
    w = jax_tcgemm.from_gptq(tensors, bits=bits)
    np.testing.assert_array_equal(np.asarray(unpack(w).zero_point), zero)


def test_symmetric_gptq_needs_no_zero_points():
    q = RNG.integers(0, 16, (K, N))
    tensors = {
        "qweight": words_of(q, 4, 0),
        "qzeros": words_of(np.full(F16.shape, 7), 4, 1),
        "scales": F16,
    }
    w = jax_tcgemm.from_gptq(tensors)
    assert (w.zero_points, w.format.qtype) == (None, "int4")
    check(w, q, np.full(F16.shape, 8), F16)


def test_awq(source):
    q, zero = RNG.integers(0, 16, (K, N)), RNG.integers(0, 16, F16.shape)
    tensors = {"qweight": awq_words(q), "qzeros": awq_words(zero), "scales": F16}
    check(jax_tcgemm.from_awq(source(tensors)), q, zero, F16)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("how", ["symmetric", "asymmetric", "act-order", "channel"])
def test_compressed_tensors(source, bits, how):
    middle = 2 ** (bits - 1)
    q = RNG.integers(-middle, middle, (N, K))
    groups = 1 if how == "channel" else K // GROUP
    scale = jnp.asarray(RNG.uniform(0.01, 0.1, (N, groups)), jnp.bfloat16)
    zero, g_idx = np.zeros((N, groups), int), None
    tensors = {
        "weight_packed": words_of(q + middle, bits, 1),
        "weight_shape": np.array([N, K], np.int32),
        "weight_scale": scale,
    }
    if how == "asymmetric":
        zero = RNG.integers(-middle, middle, (N, groups))
        tensors["weight_zero_point"] = words_of(zero + middle, bits, 0)
    if how == "act-order":
        g_idx = RNG.permutation(np.arange(K, dtype=np.int32) // GROUP)
        tensors["weight_g_idx"] = g_idx
    w = jax_tcgemm.from_compressed_tensors(source(tensors), bits=bits)
    check(w, q.T, zero.T, np.asarray(scale).T, g_idx)


def test_compressed_tensors_of_int8(source):
    q = RNG.integers(-128, 128, (N, K)).astype(np.int8)
    scale = RNG.uniform(0.01, 0.1, (N, 1)).astype(np.float32)
    tensors = {"weight": q, "weight_scale": scale}
    w = jax_tcgemm.from_compressed_tensors(source(tensors), bits=8)
    check(w, q.T, np.zeros((1, N)), scale.T)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("how", ["one", "scalar", "rows", "groups", "large groups", "mx", "blocks"])
def test_float8(source, dtype, how):
    rng, n, k = np.random.default_rng(5), 200, 320
    weight = (rng.standard_normal((n, k)) * 2.0 ** rng.integers(-6, 4, (n, k))).astype(dtype)
    shape = {
        "one": (1,),
        "scalar": (),
        "rows": (n, 1),
        "groups": (n, k // 64),
        "large groups": (n, k // 160),
        "mx": (n, k // 32),
        "blocks": (2, 3),
    }[how]
    scale = rng.uniform(0.25, 4, shape).astype(np.float32)
    if how == "mx":
        bits = rng.integers(120, 130, shape).astype(np.uint8)
        scale = bits.view(jnp.float8_e8m0fnu).astype(np.float32)
    name = "weight_scale_inv" if how == "blocks" else "weight_scale"
    tensors = {"a.weight": weight, f"a.{name}": bits if how == "mx" else scale}
    w = jax_tcgemm.from_float8(source(tensors), "a.")
    own = {"groups": 64, "large groups": 32, "mx": 32, "blocks": 64}.get(how, k)
    assert (w.shape, w.format.qtype, w.format.group_size) == ((k, n), dtype, own)
    whole = scale
    if how == "blocks":
        whole = scale.repeat(128, 0)[:n].repeat(128, 1)[:, :k]
    elif scale.ndim == 2:
        whole = scale.repeat(k // scale.shape[1], 1)
    expected = (weight.astype(np.float32) * whole).T
    np.testing.assert_array_equal(np.asarray(w.dequantize(jnp.float32)), expected)
    x = rng.standard_normal((3, k)).astype(jnp.bfloat16)
    y = np.asarray(jax_tcgemm.matmul(x, w), np.float64)
    x = x.astype(np.float64)
    bound = 2.0**-7 * abs(x) @ abs(expected)
    assert (abs(y - x @ expected) <= bound).all()


def bitsandbytes_of(n, k, size, quant_type="nf4", nested_blocksize=None):
    """A weight "l.weight" as bitsandbytes writes it, and its values by the formula."""
    q = RNG.integers(0, 16, n * k)
    table = np.sort(RNG.integers(-128, 128, 16) / 128).astype(np.float32)
    state = {"quant_type": quant_type, "blocksize": size, "shape": [n, k], "dtype": "bfloat16"}
    blocks = -(-n * k // size)
    absmax = (RNG.integers(1, 256, blocks) / 128).astype(np.float32)
    tensors = {
        "l.weight": (q[::2] << 4 | q[1::2]).astype(np.uint8)[:, None],
        "l.weight.quant_map": table,
        "l.weight.absmax": absmax,
    }
    if nested_blocksize is not None:
        codes = (np.sort(RNG.integers(-128, 128, 256)) / 128).astype(np.float32)
        nested = (RNG.integers(1, 256, -(-blocks // nested_blocksize)) / 128).astype(np.float32)
        numbers = RNG.integers(0, 256, blocks).astype(np.uint8)
        state |= {"nested_blocksize": nested_blocksize, "nested_offset": 3.25}
        tensors |= {"l.weight.nested_quant_map": codes, "l.weight.nested_absmax": nested}
        tensors["l.weight.absmax"] = numbers
        absmax = codes[numbers] * nested[np.arange(blocks) // nested_blocksize] + np.float32(3.25)
    text = json.dumps(state).encode()
    tensors[f"l.weight.quant_state.bitsandbytes__{quant_type}"] = np.frombuffer(text, np.uint8)
    return tensors, (table[q] * absmax[np.arange(n * k) // size]).reshape(n, k)


@pytest.mark.parametrize("nested_blocksize", [None, 256])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bitsandbytes(source, nested_blocksize, quant_type):
    tensors, expected = bitsandbytes_of(40, 192, 64, quant_type, nested_blocksize)
    w = jax_tcgemm.from_bitsandbytes(source(tensors), "l.weight")
    assert (w.format.group_size, w.format.scale_dtype) == (64, "float32")
    np.testing.assert_array_equal(dequantize(w), expected.T)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float16", "float32"])
def test_bytes_of_bitsandbytes_stored_as_another_dtype(source, dtype):
    tensors, expected = bitsandbytes_of(40, 192, 64)
    tensors["l.weight"] = tensors["l.weight"].reshape(-1).view(jnp.dtype(dtype))[:, None]
    w = jax_tcgemm.from_bitsandbytes(source(tensors), "l.weight")
    np.testing.assert_array_equal(dequantize(w), expected.T)


def dequantized_of(q, zero, scale, rows):
    """(q - zero) * scale in float32, of rows of k by the numbers of their groups."""
    return (q - zero[rows]).astype(np.float32) * np.asarray(scale, np.float32)[rows]


@pytest.mark.parametrize("size", [96, 256, 512])
@pytest.mark.parametrize("order", ["neighbors", "act-order"])
def test_scales_of_larger_groups_are_repeated(size, order):
    k, groups = 4 * size, 4
    q, zero = RNG.integers(0, 16, (k, N)), RNG.integers(0, 16, (groups, N))
    scale = RNG.uniform(0.01, 0.1, (groups, N)).astype(np.float32)
    rows = np.arange(k) // size
    if order == "act-order":
        rows = RNG.permutation(rows)
    expected = dequantized_of(q, zero, scale, rows)
    tensors = {"qweight": words_of(q, 4, 0), "qzeros": gptq_zeros(zero, 4), "scales": scale}
    w = jax_tcgemm.from_gptq(tensors | {"g_idx": rows})
    assert w.format.group_size == (32 if size == 96 else 128)
    np.testing.assert_array_equal(dequantize(w), expected)
    tensors = {
        "weight_packed": words_of(q.T, 4, 1),
        "weight_shape": np.array([N, k]),
        "weight_scale": scale.T,
        "weight_zero_point": words_of(zero.T, 4, 0),
        "weight_g_idx": rows,
    }
    np.testing.assert_array_equal(dequantize(jax_tcgemm.from_compressed_tensors(tensors)), expected)
    if order == "neighbors":
        tensors = {"qweight": awq_words(q), "qzeros": awq_words(zero), "scales": scale}
        np.testing.assert_array_equal(dequantize(jax_tcgemm.from_awq(tensors)), expected)
        tensors = {"qvalue": q.astype(np.int8), "scale": scale, "zero_point": zero}
        np.testing.assert_array_equal(dequantize(jax_tcgemm.from_qwix(tensors)), expected)


@pytest.mark.parametrize(
    ("n", "k", "size"),
    [(8, 512, 256), (8, 512, 512), (16, 512, 4096), (6, 192, 256), (3, 96, 64), (5, 100, 512)],
)
def test_blocks_of_bitsandbytes_that_are_no_groups(n, k, size):
    """Larger ones, some rows long, some going on in the middle of the next row."""
    tensors, expected = bitsandbytes_of(n, k, size)
    w = jax_tcgemm.from_bitsandbytes(tensors, "l.weight")
    np.testing.assert_array_equal(dequantize(w), expected.T)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("how", ["packed", "int8"])
@pytest.mark.parametrize("has_zero_point", [False, True])
def test_one_scale_of_compressed_tensors(shape, how, has_zero_point):
    q, zero = RNG.integers(-128, 128, (N, K)), np.full(shape, -3 * has_zero_point, np.int8)
    scale = np.full(shape, 0.25, np.float32)
    tensors = {"weight_scale": scale} | ({"weight_zero_point": zero} if has_zero_point else {})
    if how == "packed":
        packed = words_of(q + 128, 8, 1)
        tensors |= {"weight_packed": packed, "weight_shape": np.array([N, K])}
    else:
        tensors["weight"] = q.astype(np.int8)
    w = jax_tcgemm.from_compressed_tensors(tensors, bits=8)
    np.testing.assert_array_equal(dequantize(w), (q.T + 3 * has_zero_point) * np.float32(0.25))


def test_a_short_last_block_of_a_quantized_array():
    """288 rows in blocks of 128 are three groups, but not of 96 rows."""
    x = jax_tcgemm.quantize(
        jnp.asarray(RNG.standard_normal((288, N)), jnp.float32), "int8", block=(128, 1)
    )
    w = jax_tcgemm.from_qwix(x)
    assert (x.scale.shape, w.format.group_size) == ((3, N), 32)
    np.testing.assert_array_equal(dequantize(w), jax_tcgemm.dequantize(x))
    np.testing.assert_array_equal(
        jax.jit(lambda x: jax_tcgemm.from_qwix(x).dequantize())(x), jax_tcgemm.dequantize(x)
    )


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_qwix(source, dtype):
    q = RNG.integers(-8, 8, (K, N))
    scale = RNG.uniform(0.01, 0.1, (K // GROUP, N)).astype(np.float32)
    zero = RNG.integers(-8, 8, scale.shape)
    array = types.SimpleNamespace(
        qvalue=jnp.asarray(q, dtype), scale=scale, zero_point=zero, qtype=dtype
    )
    check(jax_tcgemm.from_qwix(array), q, zero, scale)
    wrapped = types.SimpleNamespace(array=array)
    check(jax_tcgemm.from_qwix(wrapped), q, zero, scale)
    tensors = {"qvalue": q.astype(np.int8), "scale": scale[:1]}
    check(jax_tcgemm.from_qwix(source(tensors)), q, np.zeros((1, N)), scale[:1])


def test_float8_of_qwix(source):
    q = RNG.standard_normal((K, N)).astype(jnp.float8_e5m2)
    scale = RNG.uniform(0.01, 0.1, (K // GROUP, N)).astype(np.float32)
    w = jax_tcgemm.from_qwix(source({"qvalue": q, "scale": scale}))
    assert (w.format.qtype, w.format.group_size) == ("float8_e5m2", GROUP)
    expected = q.astype(np.float32) * scale.repeat(GROUP, 0)
    np.testing.assert_array_equal(np.asarray(w.dequantize()), expected)


def test_arrays_that_qwix_makes():
    qwix = pytest.importorskip("qwix")
    w = jnp.asarray(RNG.standard_normal((K, N)), jnp.float32)
    for qtype in ("int4", "int8", "nf4"):
        array = qwix.quantize(w, qtype, channelwise_axes=(1,), tiled_axes={0: GROUP})
        packed = jax_tcgemm.from_qwix(array)
        np.testing.assert_allclose(dequantize(packed), qwix.dequantize(array), rtol=1e-6)


GPTQ = {
    "qweight": words_of(np.zeros((K, N)), 4, 0),
    "qzeros": words_of(np.zeros(F16.shape), 4, 1),
    "scales": F16,
}


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: jax_tcgemm.from_gptq(GPTQ, "a."), ValueError, "from_gptq: source must have a.qwe"),
        (lambda: jax_tcgemm.from_gptq(GPTQ, bits=3), ValueError, "from_gptq: bits must be 4 or 8"),
        (lambda: jax_tcgemm.from_gptq(7), TypeError, "from_gptq: source must be a dictionary"),
        (
            lambda: jax_tcgemm.from_gptq(GPTQ | {"scales": F16[:3]}),
            ValueError,
            "from_gptq: scales must be of shape \\(groups, n\\) = \\(a divisor of 256, 48\\), got ",
        ),
        (
            lambda: jax_tcgemm.from_gptq(GPTQ | {"scales": F16 * np.float16(np.nan)}),
            ValueError,
            "from_gptq: scales must be finite",
        ),
        (
            lambda: jax_tcgemm.from_gptq(GPTQ | {"qweight": F16}),
            TypeError,
            "from_gptq: qweight must be of int32 or uint32, got qweight.dtype=float16",
        ),
        (
            lambda: jax_tcgemm.from_gptq(GPTQ | {"g_idx": np.zeros(K, np.int32)}),
            ValueError,
            "from_gptq: g_idx must name each of 4 groups 64 times",
        ),
        (
            lambda: jax_tcgemm.from_qwix(
                jax_tcgemm.quantize(jnp.ones((64, 64)), "int8", block=(32, 32))
            ),
            ValueError,
            "from_qwix: scale must be of shape \\(groups, 1 or n\\) = \\(a divisor of 64, 1 or 64",
        ),
        (
            lambda: jax_tcgemm.from_qwix(
                jax_tcgemm.QuantizedArray(jnp.ones((K, N), jnp.uint4), F16[:1], None, "nf3")
            ),
            TypeError,
            "from_qwix: source.qtype must be an integer or floating-point dtype, or int2, .*nf4, ",
        ),
    ],
)
def test_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


# --- malformed checkpoints ----------------------------------------------------------------------

# Sizes of malformed checkpoints.
n, k, groups = 24, 128, 4


def _formats():
    """Well-formed checkpoints by name: a loader, and its arrays, of shapes that are not square.

    Scales are exact in every floating-point dtype, and integers of Qwix in every integer dtype.
    """
    rng = np.random.default_rng(1)
    scale = (rng.integers(1, 128, (groups, n)) / 64).astype(np.float32)
    rows = rng.permutation(np.arange(k, dtype=np.int32) // (k // groups))
    forms = {}
    for bits in (4, 8):
        q, zero = rng.integers(0, 2**bits, (k, n)), rng.integers(0, 2**bits, (groups, n))
        gptq = {"qweight": words_of(q, bits, 0), "qzeros": gptq_zeros(zero, bits), "scales": scale}
        load = functools.partial(jax_tcgemm.from_gptq, bits=bits)
        forms[f"gptq {bits}"] = load, gptq
        forms[f"gptq {bits} act-order"] = load, gptq | {"g_idx": rows}
        load = functools.partial(jax_tcgemm.from_compressed_tensors, bits=bits)
        packed = {
            "weight_packed": words_of(q.T, bits, 1),
            "weight_shape": np.array([n, k]),
            "weight_scale": scale.T,
        }
        forms[f"compressed-tensors {bits}"] = load, packed
        zeros = {"weight_zero_point": words_of(zero.T, bits, 0), "weight_g_idx": rows}
        forms[f"compressed-tensors {bits} asymmetric"] = load, packed | zeros
        integers = {
            "weight": (q.T - 2 ** (bits - 1)).astype(np.int8),
            "weight_scale": scale.T,
            "weight_zero_point": (zero.T - 2 ** (bits - 1)).astype(np.int8),
        }
        forms[f"compressed-tensors {bits} of int8"] = load, integers
        one = {"weight_scale": scale[0, :1], "weight_zero_point": np.array([3], np.int8)}
        forms[f"compressed-tensors {bits} with one scale"] = load, packed | one
        own = {"qvalue": q % 8, "scale": scale, "zero_point": zero % 8}
        own |= {name: own[name].astype(f"int{bits}") for name in ("qvalue", "zero_point")}
        forms[f"qwix {bits}"] = jax_tcgemm.from_qwix, own
        deep = {name: x.reshape(len(x), 3, n // 3) for name, x in own.items()}
        forms[f"qwix {bits} of three dimensions"] = jax_tcgemm.from_qwix, deep
    q, zero = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (groups, n))
    awq = {"qweight": awq_words(q), "qzeros": awq_words(zero), "scales": scale}
    forms["awq"] = jax_tcgemm.from_awq, awq
    load = functools.partial(jax_tcgemm.from_bitsandbytes, name="l.weight")
    forms["bitsandbytes"] = load, bitsandbytes_of(n, k, 64)[0]
    forms["bitsandbytes nested"] = load, bitsandbytes_of(n, k, 64, "nf4", 16)[0]
    words = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    powers = rng.integers(120, 130, (n, k // 32)).astype(np.uint8)
    scale = rng.uniform(1, 8, (n, k // 16)).astype(jnp.float8_e4m3fn)
    whole = np.full(1, 0.25, np.float32)
    mxfp4 = {"weight_packed": words, "weight_scale": powers}
    forms["compressed-tensors mxfp4"] = jax_tcgemm.from_compressed_tensors, mxfp4
    nvfp4 = {"weight_packed": words, "weight_scale": scale, "weight_global_scale": whole}
    forms["compressed-tensors nvfp4"] = jax_tcgemm.from_compressed_tensors, nvfp4
    nvfp4 = {"weight": words, "weight_scale": scale, "weight_scale_2": whole}
    forms["modelopt"] = jax_tcgemm.from_modelopt, nvfp4
    weight = rng.standard_normal((n, k)).astype(jnp.float8_e4m3fn)
    float8 = {"weight": weight, "weight_scale": scale.astype(np.float32)}
    # Powers of two of another dtype are scales of another format.
    forms["float8"] = jax_tcgemm.from_float8, float8
    blocks = words.reshape(2, n // 2, k // 32, 16)
    experts = {"w_blocks": blocks, "w_scales": powers.reshape(2, n // 2, k // 32)}
    forms["gpt-oss"] = functools.partial(jax_tcgemm.from_gpt_oss, prefix="w"), experts
    return forms


FORMATS = _formats()
# Without these a checkpoint is another well-formed one.
OPTIONAL = ("g_idx", "weight_g_idx", "weight_zero_point", "zero_point")
MISSING = object()
DTYPES = (
    *("bool", "int4", "uint4", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"),
    *("float8_e4m3fn", "bfloat16", "float16", "float32", "float64", "complex64", "object", "str"),
)


def _dtype(name):
    return np.dtype(name) if name in ("object", "str") else jnp.dtype(name)


def _with_row(x, axis, how):
    """One row less along an axis, one more, none, or the first alone."""
    rows = {"drop": range(1, x.shape[axis]), "add": (0, *range(x.shape[axis])), "none": ()}
    return np.take(x, np.array(rows[how], int), axis)


@st.composite
def malformed(draw, tensors):
    """One array, and what is given in its place, `MISSING` for nothing."""
    name = draw(st.sampled_from(sorted(tensors)))
    x = np.asarray(tensors[name])
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    how = draw(st.sampled_from(["missing", "dtype", "rows", "shape", "value", "fraction", "other"]))
    if how == "missing":
        hypothesis.assume(name not in OPTIONAL)
        return name, MISSING
    if how == "dtype":
        wide = x.astype(np.int32) if x.dtype == jnp.int4 else x  # NumPy does not make it uint4.
        wide = x.astype(np.float32) if x.dtype == jnp.float8_e4m3fn else wide  # nor this text
        return name, wide.astype(_dtype(draw(st.sampled_from(DTYPES))))
    if how == "rows":
        hypothesis.assume("quant_state" not in name)  # Text without a digit may be another state.
        axis = draw(st.integers(0, x.ndim - 1))
        return name, _with_row(x, axis, draw(st.sampled_from(["drop", "add", "none"])))
    if how == "shape":
        shapes = {"T": x.T, "flat": x.reshape(-1), "more": x[None]}
        if name != "weight_scale":  # One scale is for the whole weight.
            shapes["one"] = x.reshape(-1)[0]
        return name, shapes[draw(st.sampled_from(sorted(shapes)))]
    if how == "fraction":
        return name, x.astype(np.float32) + np.float32(not is_float) / 2
    if how == "other":
        values = [None, "text", True, [1, 2], {}, object(), np.ma.ones(3), jax.random.key(0)]
        return name, draw(st.sampled_from(values))
    index = draw(st.integers(0, x.size - 1))
    if is_float:
        x = x.copy()
        x.reshape(-1)[index] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        return name, x
    # Integers whose low 32 bits are those of another one.
    x = x.astype(np.int64)
    x.reshape(-1)[index] += draw(st.sampled_from([2**8, 2**16, 2**31, 2**32, -(2**32), 2**40]))
    return name, x


@functools.cache
def _expected(form):
    load, tensors = FORMATS[form]
    return np.asarray(dequantize(load(tensors), dtype=jnp.float32))


def _is_refused_or_harmless(form, tensors):
    load, _ = FORMATS[form]
    op = load.func.__name__ if isinstance(load, functools.partial) else load.__name__
    message, w = "", None
    try:
        w = load(tensors)
    except (ValueError, TypeError) as error:
        message = str(error)
    if w is None:
        assert re.match(rf"{op}: .*must .*, got .*; ", message, re.DOTALL), message
    else:
        np.testing.assert_array_equal(np.asarray(dequantize(w, dtype=jnp.float32)), _expected(form))


@pytest.mark.all_cases
@pytest.mark.filterwarnings("ignore:.*encountered in cast", "ignore:Casting complex")
@pytest.mark.parametrize("form", FORMATS)
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(data=st.data())
def test_malformed_arrays_are_refused(form, data):
    tensors = FORMATS[form][1]
    name, x = data.draw(malformed(tensors))
    # Scales of uint8 are well-formed there: they hold exponents.
    hypothesis.assume(form != "float8" or getattr(x, "dtype", None) != np.uint8)
    changed = {other: x for other, x in tensors.items() if other != name}
    _is_refused_or_harmless(form, changed if x is MISSING else changed | {name: x})


@pytest.mark.parametrize("form", ["bitsandbytes", "bitsandbytes nested"])
@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(data=st.data())
def test_malformed_states_of_bitsandbytes_are_refused(form, data):
    tensors = FORMATS[form][1]
    name = "l.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(tensors[name].tobytes())
    keys = [key for key in state if key not in ("quant_type", "dtype")]
    key = data.draw(st.sampled_from(keys))
    values = [None, "64", True, [], {}, 0, -1, 1e999, float("nan"), 10**400, [n], [n, k, 1]]
    values += [[n, -k], [n, k + 1], [n, str(k)], [True, n * k]]
    value = data.draw(st.sampled_from(values))
    hypothesis.assume(key != "nested_offset" or value not in (0, -1))
    text = json.dumps(state | {key: value})
    texts = [
        text,
        text[:-1],
        "[]",
        "[" * 100000,
        json.dumps({other: x for other, x in state.items() if other != key}),
    ]
    text = data.draw(st.sampled_from(texts)).encode()
    _is_refused_or_harmless(form, tensors | {name: np.frombuffer(text, np.uint8)})


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("form", "changes", "says"),
    [
        ("gptq 4", lambda x: {"qzeros": x["qzeros"][:0]}, "qzeros must be of shape"),
        ("gptq 4", lambda x: {"qzeros": x["qzeros"][:1]}, "qzeros must be of shape"),
        ("gptq 8", lambda x: {"qzeros": x["qzeros"].T}, "qzeros must be of shape"),
        ("awq", lambda x: {"qzeros": x["qzeros"][:1]}, "qzeros must be of shape"),
        ("awq", lambda x: {"scales": x["scales"][:0]}, "scales must be of shape"),
        (
            "gptq 4 act-order",
            lambda x: {"g_idx": x["g_idx"].astype(np.int64) + 2**32},
            "g_idx must be from ",
        ),
        (
            "compressed-tensors 4 of int8",
            lambda x: {"weight_zero_point": x["weight_zero_point"] + np.float32(0.5)},
            "weight_zero_point must be of uint8, int8, ",
        ),
        (
            "compressed-tensors 8 of int8",
            lambda x: {"weight_zero_point": x["weight_zero_point"].T},
            "weight_zero_point must be of shape",
        ),
        (
            "compressed-tensors 4 asymmetric",
            lambda x: {"weight_g_idx": np.where(np.arange(k) == 5, -1, x["weight_g_idx"])},
            "weight_g_idx must name each of 4 groups 32 times",
        ),
        (
            "compressed-tensors 4",
            lambda x: {"weight_shape": np.array([n, k // 2])},
            "weight_packed must be of shape",
        ),
        (
            "bitsandbytes nested",
            lambda x: {"l.weight.nested_absmax": x["l.weight.nested_absmax"][:-1]},
            "l.weight.nested_absmax must be of shape",
        ),
        (
            "bitsandbytes nested",
            lambda x: {"l.weight.nested_quant_map": x["l.weight.nested_quant_map"][:200]},
            "l.weight.nested_quant_map must be of shape",
        ),
        (
            "qwix 8",
            lambda x: {"zero_point": x["zero_point"].astype(np.uint32) + np.uint32(2**32 - 8)},
            "zero_point must be from",
        ),
        ("gptq 4", lambda x: {"scales": np.repeat(x["scales"], 2, 0)}, "qzeros must be of shape"),
        (
            "compressed-tensors 4",
            lambda x: {"weight_scale": np.repeat(x["weight_scale"], 4, 1)},
            "weight_scale must have groups of whole columns or of multiples of 16 rows",
        ),
    ],
)
def test_what_was_read_as_another_weight_is_refused(form, changes, says):
    load, tensors = FORMATS[form]
    with pytest.raises((ValueError, TypeError), match=f"^from_[a-z_]+: {re.escape(says)}"):
        load(tensors | changes(tensors))
