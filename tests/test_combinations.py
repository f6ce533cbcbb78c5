"""Every function, operand encoding and feature together: right, or refused by name."""

import dataclasses
import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import (
    ENCODINGS,
    FEATURES,
    FUNCTIONS,
    PAGE,
    K,
    M,
    N,
    dequantized,
    has_feature,
    refusal,
    rendered,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm

CELLS = [
    (function, encoding, feature)
    for function in FUNCTIONS
    for encoding in ENCODINGS
    for feature in FEATURES
    if has_feature(function, feature)
]


def _soft_cap(*accs):
    return jnp.tanh(sum(accs)) + 1


def _keywords(feature: str) -> dict:
    return {
        "activation": {"activation": "silu"},
        "epilogue": {"epilogue": _soft_cap},
        "batch_invariant": {"batch_invariant": True},
    }.get(feature, {})


@functools.cache
def _operands(function: str, encoding: str):
    rng = np.random.default_rng(0)
    own = FUNCTIONS[function]
    x = rng.standard_normal((M, K)).astype(np.float32)
    w = (rng.standard_normal(own.weight) / 8).astype(np.float32)
    how = ENCODINGS[encoding]
    return how.x(jnp.asarray(x)), how.weight(jnp.asarray(w), own.contracted)


def _reference(function: str, feature: str, x, w) -> np.ndarray:
    """The result of both operands' numbers, in float64 or complex128 as x is."""
    own = FUNCTIONS[function]
    accs = own.accumulators(x, w)
    accs = accs if isinstance(accs, list) else [accs]
    if feature == "epilogue":
        in_groups = np.arange(M)[:, None] < 14 if "ragged" in function else True
        return np.where(in_groups, np.tanh(sum(accs)) + 1, 0)
    if feature == "activation":
        accs = [accs[0] / (1 + np.exp(-accs[0])), *accs[1:]]
    return own.finish(*accs)


def _reference_gradient(function: str, x, w) -> np.ndarray:
    """The gradient of the sum of the result's sine by x, whose rows give one row each."""
    # An imaginary step is so small that nothing but the first derivative is left of it.
    steps = x + 1e-30j * np.eye(K)[:, None]
    results = np.sin(_reference(function, "gradient", steps, w))
    return results.reshape(K, M, -1).sum(-1).imag.T / 1e-30


def _call(function: str, encoding: str, feature: str):
    how = ENCODINGS[encoding].how | _keywords(feature)
    return functools.partial(FUNCTIONS[function].run, **how)


def _assert_near(got, expected, rtol: float) -> None:
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=rtol * np.abs(expected).max())


def _visit(function: str, encoding: str, feature: str) -> None:
    """Assert that a cell's value is right."""
    x, w = _operands(function, encoding)
    f, rtol = _call(function, encoding, feature), ENCODINGS[encoding].rtol

    def expected(x, w):
        return _reference(function, feature, dequantized(x), dequantized(w))

    if feature == "gradient":

        def loss(factor):
            if isinstance(x, jax.Array):
                operand = x * factor.astype(x.dtype)
            else:
                operand = dataclasses.replace(x, scale=x.scale * factor)
            return jnp.sin(f(operand, w).astype(jnp.float32)).sum()

        # How the loss changes as all of x does: by every number of x.
        got = jax.jit(jax.grad(loss))(jnp.float32(1))
        slopes = _reference_gradient(function, dequantized(x), dequantized(w)) * dequantized(x)
        limit = 4 * rtol * np.abs(slopes).sum()
        assert abs(float(got) - slopes.sum()) <= limit
        return
    if feature == "vmap":
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), x)
        got = jax.jit(jax.vmap(lambda x: f(x, w)))(stacked)
        _assert_near(got[0], expected(x, w), rtol)
        _assert_near(got[1], expected(jax.tree.map(lambda leaf: leaf[::-1], x), w), rtol)
        return
    if feature in ("explicit axes", "shard_map"):
        kind = AxisType.Explicit if feature == "explicit axes" else AxisType.Auto
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])
        specs = [jax.tree.map(lambda _: P(), operand) for operand in (x, w)]
        out = P("d")
        if feature == "shard_map" and "ragged" in function:
            # A device would need its own rows' groups: columns are divided, where they are.
            is_array = not isinstance(w, jax_tcgemm.PackedWeight)
            if is_array and all(leaf.shape[-1] == N for leaf in jax.tree.leaves(w)):
                specs[1] = jax.tree.map(lambda a: P(*[None] * (a.ndim - 1), "d"), w)
            out = P(None, "d") if any("d" in x for x in jax.tree.leaves(specs[1])) else P()
        else:
            specs[0] = jax.tree.map(lambda a: P("d") if a.shape[0] == M else P(), x)
        with jax.set_mesh(mesh):
            operands = [
                jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), *both)
                for both in zip((x, w), specs, strict=True)
            ]
            if feature == "shard_map":
                f = jax.shard_map(f, in_specs=tuple(specs), out_specs=out)
            got = jax.jit(f)(*operands)
        _assert_near(got, expected(x, w), rtol)
        return
    if feature == "export":
        types = jax.tree.map(jax.typeof, (x, w))
        targets = set(
            re.findall(
                r"custom_call @(tcgemm_\w+|LayoutConstraint)", jax.jit(f).lower(*types).as_text()
            )
        )
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
        exported = jax.export.export(jax.jit(f), disabled_checks=checks)(*types)
        _assert_near(exported.call(x, w), expected(x, w), rtol)
        return
    got = jax.jit(f)(x, w)
    _assert_near(got, expected(x, w), rtol)


@pytest.mark.parametrize(("function", "encoding", "feature"), CELLS)
def test_cell(function, encoding, feature):
    refused = refusal(function, encoding, feature)
    if refused is None:
        return _visit(function, encoding, feature)
    with pytest.raises(refused.error, match=refused.message):
        _visit(function, encoding, feature)


def test_the_page_has_the_tables():
    text = PAGE.read_text("utf-8")
    assert text == rendered(text), "run python tests/combinations.py"
