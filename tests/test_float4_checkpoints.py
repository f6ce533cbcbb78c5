"""Loaders of 4-bit floats, against decoders in NumPy, on checkpoints written here."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from packed_cases import dequantize
from random_arrays import normal

import jax_tcgemm

K, N, EXPERTS = 96, 40, 3
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
F8_E4M3, F8_E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def decoded(words):
    """The values of bytes, two each along the last dimension, the low nibble first."""
    codes = np.empty((*words.shape[:-1], 2 * words.shape[-1]), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = words % 16, words // 16
    return np.where(codes >= 8, -1, 1) * MAGNITUDES[codes % 8]


@pytest.fixture(params=["dictionary", "jax", "file"])
def source(request, tmp_path):
    """What makes a loader's source of a dictionary of arrays."""
    if request.param == "dictionary":
        return lambda tensors: tensors
    if request.param == "jax":
        return lambda tensors: {name: jnp.asarray(x) for name, x in tensors.items()}
    flax = pytest.importorskip("safetensors.flax")

    def write(tensors):
        path = tmp_path / "model.safetensors"
        others = {"other": jnp.arange(7, dtype=jnp.int8)}  # Offsets are others than 0.
        flax.save_file(others | {name: jnp.asarray(x) for name, x in tensors.items()}, str(path))
        return path

    return write


def words_of(rng, *shape):
    return rng.integers(0, 256, shape).astype(np.uint8)


def gpt_oss(rng, names=("_blocks", "_scales"), n=N):
    """Experts of gpt-oss, and their weights of shape (e, k, n)."""
    blocks = words_of(rng, EXPERTS, n, K // 32, 16)
    scales = rng.integers(110, 140, (EXPERTS, n, K // 32)).astype(np.uint8)
    w = decoded(blocks) * 2.0 ** (scales.astype(int) - 127)[..., None]
    w = w.reshape(EXPERTS, n, K).transpose(0, 2, 1)
    return {f"a.proj{name}": x for name, x in zip(names, (blocks, scales), strict=True)}, w


@pytest.mark.parametrize("names", [("_blocks", "_scales"), (".blocks", ".scales")])
def test_gpt_oss(source, names):
    tensors, expected = gpt_oss(np.random.default_rng(1), names)
    w = jax_tcgemm.from_gpt_oss(source(tensors), "a.proj")
    assert (w.shape, w.dtype) == ((EXPERTS, K, N), jnp.bfloat16)
    form = w.format
    assert (form.group_size, form.scale_dtype, form.has_column_scales) == (
        32,
        "float8_e8m0fnu",
        False,
    )
    np.testing.assert_array_equal(dequantize(w, dtype=jnp.float32), expected)
    rows, sizes = normal(7, K).astype(jnp.bfloat16), jnp.array([4, 0, 3])
    y = np.asarray(jax.jit(jax_tcgemm.ragged_dot)(rows, w, sizes), np.float64)
    x = np.asarray(rows, np.float64)
    for own, expert in ((slice(0, 4), 0), (slice(4, 7), 2)):
        bound = 2.0**-7 * abs(x[own]) @ abs(expected[expert])
        assert (abs(y[own] - x[own] @ expected[expert]) <= bound).all()


def test_gate_and_up_of_gpt_oss(source):
    tensors, expected = gpt_oss(np.random.default_rng(2))
    w = jax_tcgemm.from_gpt_oss(source(tensors), "a.proj", gate_up=True)
    assert w.shape == (EXPERTS, K, 2, N // 2)
    gate, up = expected[..., 0::2], expected[..., 1::2]
    np.testing.assert_array_equal(dequantize(w, dtype=jnp.float32), np.stack([gate, up], 2))
    x, sizes = normal(5, K).astype(jnp.bfloat16) * 2**-14, jnp.array([0, 5, 0])
    y = jax_tcgemm.gated_ragged_linear(x, w, sizes)
    gate, up = (np.asarray(x, np.float64) @ own[1] for own in (gate, up))
    np.testing.assert_allclose(
        np.asarray(y, np.float64),
        gate / (1 + np.exp(-gate)) * up,
        rtol=3e-2,
        atol=2e-2 * abs(gate * up).max(),
    )


def compressed_nvfp4(rng, shape=(1,)):
    """A weight (n, k) in "nvfp4-pack-quantized", and that weight transposed."""
    words, scale = words_of(rng, N, K // 2), rng.uniform(-400, 400, (N, K // 16)).astype(F8_E4M3)
    divisor = np.full(shape, rng.uniform(100, 3000), np.float32)
    tensors = {"weight_packed": words, "weight_scale": scale, "weight_global_scale": divisor}
    w = decoded(words) * (scale.astype(np.float64) / divisor.reshape(())).repeat(16, 1)
    return tensors, w.T


@pytest.mark.parametrize("shape", [(), (1,)])
def test_nvfp4_of_compressed_tensors(source, shape):
    tensors, expected = compressed_nvfp4(np.random.default_rng(3), shape)
    tensors = {"l." + name: x for name, x in tensors.items()}
    w = jax_tcgemm.from_compressed_tensors(source(tensors), "l.")
    assert (w.shape, w.format.group_size, w.format.scale_dtype) == ((K, N), 16, "float8_e4m3fn")
    # The reciprocal of the scale is rounded, and the product.
    np.testing.assert_allclose(dequantize(w, dtype=jnp.float32), expected, rtol=2**-22)
    got = np.asarray(w.unpack().scale).astype(np.float32)
    np.testing.assert_array_equal(got, tensors["l.weight_scale"].T.astype(np.float32))


@pytest.mark.parametrize("dtype", ["uint8", "float8_e8m0fnu"])
def test_mxfp4_of_compressed_tensors(source, dtype):
    rng = np.random.default_rng(4)
    words, scale = words_of(rng, N, K // 2), rng.integers(100, 150, (N, K // 32)).astype(np.uint8)
    tensors = {"weight_packed": words, "weight_scale": scale.view(jnp.dtype(dtype))}
    w = jax_tcgemm.from_compressed_tensors(source(tensors))
    assert (w.shape, w.format.group_size, w.format.scale_dtype) == ((K, N), 32, "float8_e8m0fnu")
    expected = decoded(words) * 2.0 ** (scale.astype(int) - 127).repeat(32, 1)
    np.testing.assert_array_equal(dequantize(w, dtype=jnp.float32), expected.T)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_modelopt(source, shape):
    rng = np.random.default_rng(5)
    words, scale = words_of(rng, N, K // 2), rng.uniform(0, 448, (N, K // 16)).astype(F8_E4M3)
    second = np.full(shape, rng.uniform(1e-5, 1e-3), np.float32)
    tensors = {"weight": words, "weight_scale": scale, "weight_scale_2": second}
    tensors["input_scale"] = np.float32(3)  # Of the activations.
    w = jax_tcgemm.from_modelopt(source({"l." + name: x for name, x in tensors.items()}), "l.")
    assert (w.shape, w.format.group_size) == ((K, N), 16)
    expected = decoded(words) * scale.astype(np.float64).repeat(16, 1) * float(second.reshape(()))
    # All but the last product is exact.
    np.testing.assert_array_equal(dequantize(w, dtype=jnp.float32), expected.T.astype(np.float32))
    x = normal(3, K).astype(jnp.bfloat16)
    y = np.asarray(jax_tcgemm.linear(x, w), np.float64)
    exact = np.asarray(x, np.float64) @ expected.T
    assert (abs(y - exact) <= 2.0**-7 * abs(np.asarray(x, np.float64)) @ abs(expected.T)).all()


def test_loaded_tensors_of_a_gate_and_an_up_are_one_weight():
    """Each has a scale of its own."""
    loaded = [compressed_nvfp4(np.random.default_rng(seed)) for seed in (6, 7)]
    # N is no multiple of 16 columns.
    weights = [
        jax_tcgemm.from_compressed_tensors(
            {name: x if x.size == 1 else x[:32] for name, x in tensors.items()}
        )
        for tensors, _ in loaded
    ]
    w = jax_tcgemm.stack_packed(weights, axis=1)
    expected = np.stack([w[:, :32] for _, w in loaded], 1)
    np.testing.assert_allclose(dequantize(w, dtype=jnp.float32), expected, rtol=2**-22)


def test_loaded_while_something_is_traced():
    tensors, expected = gpt_oss(np.random.default_rng(8))
    got = jax.jit(lambda: jax_tcgemm.from_gpt_oss(tensors, "a.proj").dequantize(jnp.float32))()
    np.testing.assert_array_equal(got, expected)


# --- refusals -----------------------------------------------------------------------------------


def of_gpt_oss(**changes):
    tensors, _ = gpt_oss(np.random.default_rng(0), n=changes.pop("n", N))
    how = {"gate_up": changes.pop("gate_up", False)}
    tensors |= {f"a.proj_{name}": x for name, x in changes.items()}
    return lambda: jax_tcgemm.from_gpt_oss(
        {name: x for name, x in tensors.items() if x is not None}, "a.proj", **how
    )


def of_compressed(bits=4, **changes):
    tensors = compressed_nvfp4(np.random.default_rng(0))[0] | changes
    tensors = {name: x for name, x in tensors.items() if x is not None}
    return lambda: jax_tcgemm.from_compressed_tensors(tensors, bits=bits)


def of_modelopt(**changes):
    tensors = {
        "weight": np.zeros((N, K // 2), np.uint8),
        "weight_scale": np.ones((N, K // 16), F8_E4M3),
        "weight_scale_2": np.float32(1),
    }
    tensors = {name: x for name, x in (tensors | changes).items() if x is not None}
    return lambda: jax_tcgemm.from_modelopt(tensors)


POWERS = np.full((N, K // 32), 127, np.uint8)
REFUSALS = {
    "no blocks": (of_gpt_oss(blocks=None), "from_gpt_oss: source must have a.proj_blocks, got"),
    "no scales": (of_gpt_oss(scales=None), "from_gpt_oss: source must have a.proj_scales, got"),
    "blocks of 32 bytes": (
        of_gpt_oss(blocks=np.zeros((EXPERTS, N, K // 32, 32), np.uint8)),
        "from_gpt_oss: a.proj_blocks must be of shape (experts, n, k/32, 16)",
    ),
    "scales of fewer experts": (
        of_gpt_oss(scales=np.zeros((EXPERTS - 1, N, K // 32), np.uint8)),
        "from_gpt_oss: a.proj_scales must be of shape (experts, n, k/32) = (3, 40, 3), got",
    ),
    "a scale that is NaN": (
        of_gpt_oss(scales=np.full((EXPERTS, N, K // 32), 255, np.uint8)),
        "from_gpt_oss: a.proj_scales must be finite",
    ),
    "an odd number of columns": (
        of_gpt_oss(n=41, gate_up=True),
        "from_gpt_oss: a.proj must have an even number of columns, got 41 with gate_up=True",
    ),
    "dequantized blocks": (
        of_gpt_oss(blocks=np.ones((EXPERTS, N, K // 32, 16), np.float32)),
        "from_gpt_oss: a.proj_blocks must be of uint8, got a.proj_blocks.dtype=float32",
    ),
    "8 bits": (
        of_compressed(bits=8),
        "from_compressed_tensors: bits must be 4 for weight_packed of uint8, got bits=8",
    ),
    "no scale of the tensor": (
        of_compressed(weight_global_scale=None),
        "from_compressed_tensors: source must have weight_global_scale, got",
    ),
    "a scale of the tensor that is 0": (
        of_compressed(weight_global_scale=np.zeros(1, np.float32)),
        "from_compressed_tensors: weight_global_scale must be a normal number, got 0.0",
    ),
    "scales of the tensor for each row": (
        of_compressed(weight_global_scale=np.ones(N, np.float32)),
        "from_compressed_tensors: weight_global_scale must be of shape (1) or (), got",
    ),
    "scales of e8m0 beside one of the tensor": (
        of_compressed(weight_scale=POWERS),
        "from_compressed_tensors: weight_scale must be of float8_e4m3fn, got weight_scale.dtype="
        "uint8",
    ),
    "scales of groups of 32 in e4m3": (
        of_compressed(weight_scale=np.ones((N, K // 32), F8_E4M3)),
        "from_compressed_tensors: weight_scale must be of shape (n, k/16) = (40, 6), got",
    ),
    "zero points": (
        of_compressed(weight_zero_point=POWERS),
        "from_compressed_tensors: weights of 4-bit floats must have no zero points, got weight_",
    ),
    "a NaN of e4m3": (
        of_compressed(weight_scale=np.full((N, K // 16), np.nan, F8_E4M3)),
        "from_compressed_tensors: weight_scale must be finite",
    ),
    "k that groups do not divide": (
        of_compressed(
            weight_packed=np.zeros((N, 44), np.uint8), weight_scale=np.ones((N, 6), F8_E4M3)
        ),
        "from_compressed_tensors: group_size must divide the first dimension of q, got group_size="
        "16 for 88 rows",
    ),
    "no second scale": (
        of_modelopt(weight_scale_2=None),
        "from_modelopt: source must have weight_scale_2, got",
    ),
    "a weight of 16 bits": (
        of_modelopt(weight=np.zeros((N, K), np.float16)),
        "from_modelopt: weight must be of uint8, got weight.dtype=float16",
    ),
    "no dictionary": (
        lambda: jax_tcgemm.from_modelopt([1]),
        "from_modelopt: source must be a dictionary of arrays or a path, got source of type list",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name):
    call, says = REFUSALS[name]
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(says)}"):
        call()
