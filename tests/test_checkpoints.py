"""Loaders of packed weights: bit for bit what each format says, on checkpoints written here."""

import json
import types

import jax.numpy as jnp
import numpy as np
import pytest

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


def check(w, q, zero, scale, g_idx=None):
    """The same integers less zero points, and the same scales, at every place."""
    unpacked = w.unpack()
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
def test_a_zero_point_of_0_in_gptq_borrows_from_its_neighbour(bits):
    zero = np.tile([0, 5, 0, 0, 8, 1, 2**bits - 1, 3], (K // GROUP, N // 8))
    tensors = {
        "qweight": words_of(RNG.integers(0, 2**bits, (K, N)), bits, 0),
        "qzeros": gptq_zeros(zero, bits),
        "scales": F16,
    }
    w = jax_tcgemm.from_gptq(tensors, bits=bits)
    np.testing.assert_array_equal(np.asarray(w.unpack().zero_point), zero)


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

    def words(fields):
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        fields = fields.reshape(len(fields), -1, 8)[:, :, order]
        return words_of(fields.reshape(len(fields), -1), 4, 1)

    tensors = {"qweight": words(q), "qzeros": words(zero), "scales": F16}
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


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bitsandbytes(source, is_nested, quant_type):
    n, k, size = 40, 192, 64
    q = RNG.integers(0, 16, (n, k))
    flat = q.reshape(-1, 2)
    table = np.sort(RNG.uniform(-1, 1, 16)).astype(np.float32)
    state = {"quant_type": quant_type, "blocksize": size, "shape": [n, k], "dtype": "bfloat16"}
    absmax = RNG.uniform(0.5, 2, n * k // size).astype(np.float32)
    tensors = {
        "l.weight": (flat[:, 0] << 4 | flat[:, 1]).astype(np.uint8)[:, None],
        "l.weight.quant_map": table,
    }
    if is_nested:
        codes = np.sort(RNG.uniform(-1, 1, 256)).astype(np.float32)
        nested = RNG.uniform(0.5, 2, -(-len(absmax) // 256)).astype(np.float32)
        numbers = RNG.integers(0, 256, len(absmax)).astype(np.uint8)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 3.25}
        tensors |= {"l.weight.nested_quant_map": codes, "l.weight.nested_absmax": nested}
        absmax = codes[numbers] * nested[np.arange(len(numbers)) // 256] + np.float32(3.25)
        tensors["l.weight.absmax"] = numbers
    else:
        tensors["l.weight.absmax"] = absmax
    text = json.dumps(state).encode()
    tensors[f"l.weight.quant_state.bitsandbytes__{quant_type}"] = np.frombuffer(text, np.uint8)
    w = jax_tcgemm.from_bitsandbytes(source(tensors), "l.weight")
    unpacked = w.unpack()
    scale = absmax.reshape(n, k // size).T
    np.testing.assert_array_equal(np.asarray(unpacked.q), q.T)
    np.testing.assert_array_equal(np.asarray(unpacked.scale), scale)
    expected = table[q.T] * scale.repeat(size, 0)
    np.testing.assert_array_equal(np.asarray(w.dequantize()), expected)


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


def test_arrays_that_qwix_makes():
    qwix = pytest.importorskip("qwix")
    w = jnp.asarray(RNG.standard_normal((K, N)), jnp.float32)
    for qtype in ("int4", "int8", "nf4"):
        array = qwix.quantize(w, qtype, channelwise_axes=(1,), tiled_axes={0: GROUP})
        packed = jax_tcgemm.from_qwix(array)
        np.testing.assert_allclose(packed.dequantize(), qwix.dequantize(array), rtol=1e-6)


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
            "from_gptq: scales must have groups of equal sizes, got 3 of 256",
        ),
        (
            lambda: jax_tcgemm.from_gptq(GPTQ | {"scales": F16 * np.float16(np.nan)}),
            ValueError,
            "from_gptq: scale must be finite",
        ),
        (
            lambda: jax_tcgemm.from_gptq(GPTQ | {"qweight": F16}),
            TypeError,
            "from_gptq: qweight must be a matrix of int32",
        ),
        (
            lambda: jax_tcgemm.from_gptq(GPTQ | {"g_idx": np.zeros(K, np.int32)}),
            ValueError,
            "from_gptq: g_idx must name each of 4 groups 64 times",
        ),
        (
            lambda: jax_tcgemm.from_qwix(jax_tcgemm.quantize(jnp.ones((64, 64)), block=(32, 32))),
            ValueError,
            "from_qwix: scale must be of groups of rows",
        ),
    ],
)
def test_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()
