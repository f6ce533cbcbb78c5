"""Qwix with our products: the same values as its own, by our calls."""

import dataclasses
import doctest
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from random_arrays import normal

import jax_tcgemm

qwix = pytest.importorskip("qwix")

X = normal(16, 256)


class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = jnp.tanh(linen.Dense(128)(x))
        w = self.param("w", linen.initializers.lecun_normal(), (128, 4, 32))
        return jnp.einsum("bk,khd->bhd", x, w)


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("activations", [True, False])
@pytest.mark.parametrize("tile_size", [None, 128])
def test_provider(qtype, activations, tile_size):
    from jax_tcgemm.quantization.qwix import PtqProvider

    act_qtype = qtype if activations else None
    rule = qwix.QuantizationRule(weight_qtype=qtype, act_qtype=act_qtype, tile_size=tile_size)
    model = Model()
    parameters = model.init(jax.random.key(0), X)
    theirs, ours = (
        qwix.quantize_model(model, kind([rule])) for kind in (qwix.PtqProvider, PtqProvider)
    )
    types = jax.eval_shape(theirs.init, jax.random.key(0), X)["params"]
    quantized = {"params": qwix.quantize_params(parameters["params"], types)}
    expected = np.asarray(theirs.apply(quantized, X), np.float64)
    got = np.asarray(ours.apply(quantized, X), np.float64)
    # A rounding of the first layer's sums moves few of the second one's operands by a step.
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-2 * abs(expected).max())
    assert np.linalg.norm(got - expected) < 5e-3 * np.linalg.norm(expected)
    exact = np.asarray(model.apply(parameters, X), np.float64)
    assert 0 < np.linalg.norm(got - exact) < 0.1 * np.linalg.norm(exact)
    assert len(jax_tcgemm.explain(ours.apply, quantized, X)) == 2


def test_arrays_of_qwix():
    x = qwix.quantize(X, "int8", channelwise_axes=(0,))
    w = qwix.quantize(normal(64, 256, seed=1), "int8", channelwise_axes=(0,))
    numbers = (((1,), (1,)), ((), ()))
    got = jax_tcgemm.dot_general(x, w, numbers)
    np.testing.assert_allclose(got, qwix.dot_general(x, w, numbers), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(jax_tcgemm.dequantize(x), qwix.dequantize(x))


def test_qtypes_of_qwix():
    from jax_tcgemm.quantization.qwix import _dot_general

    numbers = (((1,), (1,)), ((), ()))
    blocks = {"mxfp8": {1: 32}, "mxfp4": {1: 32}, "nvfp4": {1: 16}}
    for qtype in ("int2", "int3", "int4", "int5", "int6", "int7", *blocks, jnp.float8_e5m2):
        x = qwix.quantize(X, qtype, channelwise_axes=(0,), tiled_axes=blocks.get(qtype))
        np.testing.assert_array_equal(jax_tcgemm.dequantize(x), qwix.dequantize(x))
    x = qwix.quantize(X, "nf4", channelwise_axes=(0,))
    with pytest.raises(TypeError, match="dequantize: x must have real numbers .*x.qtype=nf4; "):
        jax_tcgemm.dequantize(x)
    exact = np.asarray(qwix.dequantize(x), np.float64)
    np.testing.assert_allclose(_dot_general(x, x, numbers), exact @ exact.T, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="dot_general: lhs.qtype must be an integer or floating"):
        _dot_general(dataclasses.replace(x, qtype="nf3"), x, numbers)


SIZES = jnp.array([5, 0, 9])  # of 16 rows


class Experts(linen.Module):
    """What Flax contracts along first, last and several dimensions, and a grouped product."""

    dtype: object = jnp.float32

    @linen.compact
    def __call__(self, x):
        def parameter(name, *shape):
            init = linen.initializers.normal(shape[-2] ** -0.5)
            return jnp.asarray(self.param(name, init, shape), self.dtype)

        x = linen.DenseGeneral((4, 64), dtype=self.dtype)(x)
        x = linen.DenseGeneral(128, axis=(-2, -1), dtype=self.dtype)(jnp.tanh(x))
        gate, up = jnp.einsum(
            "bd,ndf->nbf", jnp.asarray(x, self.dtype), parameter("up", 2, 128, 64)
        )
        x = jnp.einsum("bf,df->bd", jnp.tanh(gate) * up, parameter("down", 128, 64))
        return jax.lax.ragged_dot(x, parameter("experts", 3, 128, 48), SIZES)


def distance(got, expected):
    got, expected = (
        np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
        for tree in (got, expected)
    )
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def of_parameters(f, params):
    """What f makes of each parameter that Qwix quantized."""

    def is_quantized(x):
        return hasattr(x, "how")

    return jax.tree.map(lambda x: f(x) if is_quantized(x) else x, params, is_leaf=is_quantized)


# --- training -------------------------------------------------------------------------------------

TRAINING = {
    "int8": {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"},
    "int8 forwards": {"weight_qtype": "int8", "act_qtype": "int8"},
    "fp8 by tiles": {
        **{"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn", "tile_size": 64},
        "bwd_qtype": "float8_e5m2",
    },
}


@pytest.mark.parametrize("rule", TRAINING.values(), ids=TRAINING.keys())
def test_training(rule):
    from jax_tcgemm.quantization.qwix import QtProvider

    model, cotangent = Experts(), normal(16, 48, seed=2)
    parameters = jax.jit(model.init)(jax.random.key(0), X)

    def gradients(model, derivative=jax.grad):
        return derivative(lambda p, x: jnp.vdot(model.apply(p, x), cotangent), (0, 1))

    theirs, ours = (
        qwix.quantize_model(model, kind([qwix.QtRule(**rule)]))
        for kind in (qwix.QtProvider, QtProvider)
    )
    assert isinstance(QtProvider([]), qwix.QtProvider)
    got = jax.jit(gradients(ours))(parameters, X)
    # A rounding of sums moves few operands of the next product by a step.
    assert distance(got, jax.jit(gradients(theirs))(parameters, X)) < 1e-2
    assert 1e-3 < distance(got, jax.jit(gradients(model))(parameters, X)) < 0.2
    step = gradients(ours, jax.value_and_grad)
    calls = list(jax_tcgemm.explain(step, parameters, X, platform="cuda"))
    assert len(calls) == 3 * 5
    assert len(jax_tcgemm.explain(gradients(ours), parameters, X, platform="cuda")) == 14
    assert not jax_tcgemm.explain(gradients(theirs), parameters, X, platform="cuda")
    if rule.get("bwd_qtype") == "int8":
        # All but the sums over each group's rows, which no kernel takes.
        assert [str(call.problem).count("s8->") for call in calls].count(1) == 14


def test_training_of_nnx():
    from jax_tcgemm.quantization.qwix import QtProvider

    model = nnx.Linear(256, 64, rngs=nnx.Rngs(0))
    rule = qwix.QtRule(**TRAINING["int8"])
    theirs, ours = (
        qwix.quantize_model(model, kind([rule]), X) for kind in (qwix.QtProvider, QtProvider)
    )
    cotangent = normal(16, 64, seed=2)
    expected, got = (
        nnx.grad(lambda model: jnp.vdot(model(X), cotangent))(each) for each in (theirs, ours)
    )
    assert distance(got, expected) < 1e-5
    assert distance(got, nnx.grad(lambda model: jnp.vdot(model(X), cotangent))(model)) > 1e-3


def test_training_by_another_version_of_qwix(monkeypatch):
    from jax_tcgemm.quantization import qwix as ours

    module = sys.modules[qwix.QtProvider.__module__].dot_general_qt
    monkeypatch.delattr(module, "dot_general")
    ours._training.cache_clear()
    with pytest.raises(ImportError, match="QtProvider: .*dot_general_qt must have dot_general"):
        ours.QtProvider([])


# --- serving --------------------------------------------------------------------------------------


def served(model, rule, x=X):
    """The quantized model, its parameters, and the logits of these exactly dequantized."""
    from jax_tcgemm.quantization.qwix import PtqProvider

    parameters = jax.jit(model.init)(jax.random.key(0), x)["params"]
    quantized = qwix.quantize_model(model, PtqProvider([qwix.QuantizationRule(**rule)]))
    types = jax.eval_shape(quantized.init, jax.random.key(0), x)["params"]
    params = jax.jit(lambda parameters: qwix.quantize_params(parameters, types))(parameters)
    exact = of_parameters(lambda p: qwix.dequantize(p.array).astype(jnp.float32), params)
    # The products of another dtype than the model's are float32 ones.
    expected = jax.jit(Experts().apply)({"params": exact}, x.astype(jnp.float32))
    return quantized, {"params": params}, expected


SERVING = {
    "int4 by tiles": {"weight_qtype": "int4", "tile_size": 32},
    "int8": {"weight_qtype": "int8"},
    "nf4 by tiles": {"weight_qtype": "nf4", "tile_size": 64},
    "int3": {"weight_qtype": "int3"},
    "float8 by tiles": {"weight_qtype": "float8_e4m3fn", "tile_size": 64},
}


@pytest.mark.parametrize("rule", SERVING.values(), ids=SERVING.keys())
def test_packed_parameters(rule):
    from jax_tcgemm.quantization.qwix import pack_params

    x = X.astype(jnp.bfloat16)
    model, params, expected = served(Experts(jnp.bfloat16), rule, x)
    packed = jax.jit(pack_params)(params)
    got, unpacked = (jax.jit(model.apply)(p, x) for p in (packed, params))
    # Operands are rounded to bfloat16 between products; packed weights are not.
    assert distance(got, expected) < 1e-2
    assert distance(unpacked, expected) < 2e-2
    assert got.dtype == unpacked.dtype == jnp.bfloat16
    calls = jax_tcgemm.explain(model.apply, packed, x, platform="cuda")
    assert [call.implementation for call in calls] == ["packed"] * 5
    assert jax.tree.structure(jax.eval_shape(pack_params, params)) == jax.tree.structure(packed)


def test_packed_parameters_beside_quantized_activations():
    from jax_tcgemm.quantization.qwix import pack_params

    x = X.astype(jnp.bfloat16)
    rule = {"weight_qtype": "int4", "tile_size": 32, "act_qtype": "int8"}
    model, params, expected = served(Experts(jnp.bfloat16), rule, x)
    packed, unpacked = (jax.jit(model.apply)(p, x) for p in (pack_params(params), params))
    assert 5e-3 < distance(unpacked, expected) < 5e-2
    assert distance(packed, unpacked) < 3e-2


def test_parameters_that_stay():
    from jax_tcgemm.quantization.qwix import pack_params

    params = served(Experts(), {"weight_qtype": "int4", "tile_size": 16})[1]
    assert jax.tree.structure(pack_params(params)) == jax.tree.structure(params)
    with pytest.raises(ValueError, match="pack_params: params must have parameters that Qwix"):
        pack_params({"kernel": X})
    unknown = of_parameters(
        lambda p: p.replace(array=dataclasses.replace(p.array, qtype="nf3")), params
    )
    with pytest.raises(TypeError, match="pack_params: parameter.qtype must be an integer or float"):
        jax.eval_shape(pack_params, unknown)


def test_packed_nnx_model():
    from jax_tcgemm.quantization.qwix import PtqProvider, pack_params

    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(256, 64, dtype=jnp.bfloat16, rngs=rngs)])

        def __call__(self, x):
            return self.layers[0](x)

    rule = qwix.QuantizationRule(weight_qtype="int4", tile_size=128)
    model = qwix.quantize_model(Layers(nnx.Rngs(0)), PtqProvider([rule]), X)
    packed = pack_params(model)
    kernel = qwix.dequantize(jax.tree.map(lambda x: x[...], model.layers[0].kernel.array))
    x = X.astype(jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    assert distance(nnx.jit(lambda model, x: model(x))(packed, x), expected) < 5e-3
    assert distance(nnx.merge(*nnx.split(packed))(x), expected) < 5e-3
    (call,) = jax_tcgemm.explain(lambda model, x: model(x), packed, x, platform="cuda")
    assert call.implementation == "packed"


def test_layers_that_flax_scans():
    from jax_tcgemm.quantization.qwix import PtqProvider, pack_params

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return jnp.tanh(linen.Dense(256, param_dtype=x.dtype)(x)), None

    class Layers(linen.Module):
        @linen.compact
        def __call__(self, x):
            own = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return linen.scan(Layer, **own, length=3)()(x, None)[0]

    rule = qwix.QuantizationRule(weight_qtype="int4", tile_size=64)
    model, x = qwix.quantize_model(Layers(), PtqProvider([rule])), X.astype(jnp.bfloat16)
    stacked = jax.jit(model.init)(jax.random.key(0), x)
    packed = jax.jit(jax.vmap(pack_params))(stacked["params"])
    # Together they do not look like parameters of a product, and stay.
    assert jax.tree.structure(pack_params(stacked)) == jax.tree.structure(stacked)
    expected = np.asarray(x, np.float64)
    for i in range(3):
        (layer,) = jax.tree.map(lambda leaf: leaf[i], stacked["params"]).values()  # noqa: B023
        kernel = qwix.dequantize(layer["Dense_0"]["kernel"].array.astype(jnp.float32))
        expected = np.tanh(expected @ np.asarray(kernel, np.float64))
    assert distance(jax.jit(model.apply)({"params": packed}, x), expected) < 2e-2
    (call,) = jax_tcgemm.explain(model.apply, {"params": packed}, x, platform="cuda")
    assert call.implementation == "packed"


PRODUCTS = {
    "first": ("bk,kn->bn", (64, 48)),
    "last": ("bk,nk->nb", (48, 64)),
    "two in another order": ("bklm,kmhl->bh", (2, 32, 3, 4)),
    "middle": ("bk,hkn->bhn", (3, 64, 16)),
    "part of a tile": ("bk,hkn->bhn", (3, 64, 10)),
    "batch": ("bkh,hkn->bhn", (3, 64, 16)),
    "summed alone": ("bk,kn->b", (64, 48)),
    "ellipsis": ("...k,kn->...n", (64, 48)),
}


@pytest.mark.parametrize(("subscripts", "shape"), PRODUCTS.values(), ids=PRODUCTS.keys())
def test_products_by_packed_parameters(subscripts, shape):
    from jax_tcgemm.quantization import packed_parameter

    terms, output = subscripts.split("->")
    left, right = terms.split(",")
    extents = {**dict(zip(right, shape, strict=True)), "b": 5}
    x = normal(*(extents.get(letter, 7) for letter in left.replace("...", "bd")), dtype="bfloat16")
    axes = [right.index(letter) for letter in right if letter in left and letter not in output]
    free = [axis for axis in range(len(shape)) if axis not in axes]
    tiles = {axes[-1]: 32} if extents[right[axes[-1]]] % 32 == 0 else {}
    q = qwix.quantize(normal(*shape, seed=1), "int4", channelwise_axes=free, tiled_axes=tiles)
    w = packed_parameter.packed_parameter("test", q, axes)
    exact = np.asarray(qwix.dequantize(q), np.float64)
    np.testing.assert_allclose(w.dequantize(jnp.float32), exact, rtol=1e-6)
    expected = np.einsum(subscripts, np.asarray(x, np.float64), exact)
    assert distance(packed_parameter.einsum_product(subscripts, x, w), expected) < 1e-2
    if output == "bn":
        numbers = (((1,), tuple(axes)), ((), ()))
        assert distance(packed_parameter.product(x, w, numbers), expected) < 1e-2


@pytest.mark.parametrize("activations", [None, "int8"])
def test_experts(activations):
    rule = {"weight_qtype": "int8", "act_qtype": activations, "tile_size": 64}
    model, params, expected = served(Experts(), rule)
    got = model.apply(params, X)
    assert distance(got, expected) < (1e-5 if activations is None else 3e-2)
    assert params["params"]["experts"].array.scale.shape == (3, 2, 48)
    calls = list(jax_tcgemm.explain(model.apply, params, X, platform="cuda"))
    assert len(calls) == 5
    assert "in 3 groups" in str(calls[-1].problem)


def test_examples():
    module = importlib.import_module("jax_tcgemm.quantization.qwix")
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0
