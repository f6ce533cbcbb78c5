"""Epilogues of primitives that JAX replaces by others only when a program is lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm.system.jax_internals import jaxprs

POINTS = jnp.linspace(-6.0, 6.0, 9)
EDGES = np.linspace(-4.0, 4.0, 7, dtype="float32")

FUNCTIONS = {
    "interp": lambda acc: jnp.interp(acc, POINTS, jnp.sin(POINTS)),
    "searchsorted": lambda acc: acc * jnp.searchsorted(EDGES, acc),
    "digitize": lambda acc: (acc * jnp.digitize(acc, EDGES), acc),
    "frexp": lambda acc: acc * jnp.frexp(acc)[1],
    "ldexp": lambda acc: jnp.ldexp(acc, 2),
    "in a loop": lambda acc: jax.lax.fori_loop(
        0, 2, lambda _, y: y + jnp.interp(y, POINTS, POINTS**2 / 9), acc
    ),
    "in a checkpoint": jax.checkpoint(lambda acc: jnp.interp(acc, POINTS, jnp.sin(POINTS))),
}
SIZES = jnp.array([3, 0, 5])


def call_and_reference(op, function):
    """A public call with the epilogue, and its function of a product in float64."""
    n, wide = 12, lambda x: x.astype("float64")
    w, up, experts = (normal(*own, n) for own in ((16,), (16, 2), (3, 16)))
    blocks = [
        jax_tcgemm.quantize(normal(*shape, seed=4), block=block)
        for shape, block in (((8, 16), (1, 8)), ((16, n), (8, 1)))
    ]
    dequantized = [jax_tcgemm.dequantize(x) for x in blocks]
    calls = {
        "matmul": (lambda x: jax_tcgemm.matmul(x, w, epilogue=function), lambda x: x @ wide(w)),
        "linear": (lambda x: jax_tcgemm.linear(x, w, epilogue=function), lambda x: x @ wide(w)),
        "gated_linear": (
            lambda x: jax_tcgemm.gated_linear(x, up, epilogue=lambda a, b: function(a + b)),
            lambda x: x @ wide(up).sum(1),
        ),
        "ragged_dot": (
            lambda x: jax_tcgemm.ragged_dot(x, experts, SIZES, epilogue=function),
            lambda x: jnp.concatenate([x[:3] @ wide(experts[0]), x[3:] @ wide(experts[2])]),
        ),
        "scales of blocks": (
            lambda x: jax_tcgemm.matmul(
                *blocks, epilogue=lambda acc, y: function(acc * y), epilogue_operands=(x[:, :1],)
            ),
            lambda x: x[:, :1] * (wide(dequantized[0]) @ wide(dequantized[1])),
        ),
        "accelerate": (jax_tcgemm.accelerate(lambda x: function(x @ w)), lambda x: x @ wide(w)),
    }
    ours, product = calls[op]
    return ours, lambda x: function(product(x))


def total(f):
    return lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(f(x)))


TRANSFORMATIONS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(total(f)),
    "jit of grad": lambda f: jax.jit(jax.grad(total(f))),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
    "jit of vmap of grad": lambda f: lambda x: jax.jit(jax.vmap(jax.grad(total(f))))(x[None]),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "op", ["matmul", "linear", "gated_linear", "ragged_dot", "scales of blocks", "accelerate"]
)
def test_values_and_derivatives(op, function, x64):
    ours, theirs = call_and_reference(op, FUNCTIONS[function])
    x = normal(8, 16, seed=7)
    for name, transformed in TRANSFORMATIONS.items():
        got, expected = transformed(ours)(x), transformed(theirs)(x.astype("float64"))
        for own, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-3, err_msg=name)


def test_the_reason_is_named():
    x, w = normal(8, 16), normal(16, 12)
    for function, word in (("interp", "gather"), ("searchsorted", "scan")):
        f = lambda x: jax_tcgemm.matmul(x, w, epilogue=FUNCTIONS[function])  # noqa: B023, E731
        (call,) = jax_tcgemm.explain(f, x, platform="cuda")
        assert call.why.startswith(f"unfused: epilogue: {word}(")
        assert "must be elementwise to be part of a kernel" in call.why


def test_what_becomes_elementwise_is_fused():
    x = normal(4096, 4096, dtype="bfloat16")
    f = lambda x: jax_tcgemm.matmul(x, x, epilogue=FUNCTIONS["ldexp"])  # noqa: E731
    (call,) = jax_tcgemm.explain(f, jax.typeof(x), platform="cuda")
    assert not call.why.startswith("unfused"), call.why


def test_without_what_jax_replaces_them_by(monkeypatch):
    """As of a JAX that has another name for that."""
    monkeypatch.setattr(jaxprs, "_lower_jaxpr", None)
    x, w = normal(8, 16), normal(16, 12)
    function = lambda acc: jnp.interp(acc, POINTS, POINTS**3)  # noqa: E731
    f = functools.partial(jax_tcgemm.matmul, epilogue=function)
    expected = np.interp(np.float64(x) @ np.float64(w), POINTS, np.float64(POINTS) ** 3)
    for run in (f, jax.jit(f)):
        np.testing.assert_allclose(run(x, w), expected, rtol=1e-4, atol=1e-3)
