"""Products with bias, activation, gate, residual and column sums, divided over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import MESHES, assert_close, compiled, mesh_of, normal

import jax_tcgemm

SPECS = {
    "m": ([P("x"), P(), P()], {}),
    "n": ([P(), P(None, "x"), P("x")], {}),
    "m, n": ([P("x"), P(None, "y"), P("y")], {}),
    "k": ([P(None, "x"), P("x"), P()], {"all-reduce": 1}),
    "m, n, k": ([P("x", "z"), P("z", "y"), P("y")], {"all-reduce": 1}),
}
KINDS = {
    "bias": {},
    "activation": {"activation": "gelu"},
    "residual": {"activation": "silu", "residual": True},
}


@pytest.fixture(params=SPECS.values(), ids=SPECS.keys())
def specs(request):
    return request.param


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_values_and_gradients(kind, specs):
    """Bias, activation and residual come once, after the sum over devices."""
    (lhs, rhs, bias), collectives = specs
    mesh = mesh_of(AxisType.Auto)
    values = [normal(16, 24, seed=0), normal(24, 32, seed=1) / 4, normal(32, seed=2)]
    shardings = [lhs, rhs, bias]
    activation = kind.get("activation")
    if kind.get("residual"):
        values.append(normal(16, 32, seed=3))
        shardings.append(P(lhs[0] if len(lhs) else None, *bias))

    def ours(x, w, b, *residual):
        given = {"residual": residual[0]} if residual else {}
        return jax_tcgemm.linear(x, w, b, activation=activation, implementation="host", **given)

    def plain(x, w, b, *residual):
        y = getattr(jax.nn, activation or "identity")(x @ w + b)
        return y + sum(residual)

    args = [
        jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(values, shardings, strict=True)
    ]
    text, found = compiled(ours, *args)
    assert 'custom_call_target="tcgemm_gemm"' in text
    assert " dot(" not in text
    assert found == collectives
    argnums = tuple(range(len(args)))

    def grads(f):
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), argnums))

    with jax.enable_x64(True):
        wide = [v.astype(np.float64) for v in values]
        expected, expected_grads = plain(*wide), grads(plain)(*wide)
    assert_close(jax.jit(ours)(*args), expected)
    assert_close(grads(ours)(*args), expected_grads)
    assert " dot(" not in compiled(grads(ours), *args)[0]


@MESHES
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_block(gated, axis_type):
    """Tokens over one axis; over automatic axes also up by columns and down by rows."""
    mesh = mesh_of(axis_type, (2, 4), ("data", "model"))
    model = "model" if axis_type == AxisType.Auto else None
    pair = (2,) if gated else ()
    values = {
        "x": normal(8, 12, seed=0),
        "up": normal(12, *pair, 16, seed=1) / 3,
        "up_bias": normal(*pair, 16, seed=2),
        "down": normal(16, 12, seed=3) / 3,
        "down_bias": normal(12, seed=4),
    }
    whole = [None] * len(pair)
    specs = {
        "x": P("data"),
        "up": P(None, *whole, model),
        "up_bias": P(*whole, model),
        "down": P(model),
        "down_bias": P(),
    }

    def ours(params):
        params = dict(params)
        x = params.pop("x")
        return jax_tcgemm.mlp(x, params, activation="silu", residual=x, implementation="host")

    def plain(params):
        x = params["x"]
        z = jnp.tensordot(x, params["up"], 1) + params["up_bias"]
        h = jax.nn.silu(z[:, 0]) * z[:, 1] if gated else jax.nn.silu(z)
        return h @ params["down"] + params["down_bias"] + x

    def grads(f):
        return jax.grad(lambda params: jnp.sum(jnp.sin(f(params))))

    with jax.set_mesh(mesh):
        args = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in values.items()}
        text, ours_move = compiled(grads(ours), args)
        _, theirs_move = compiled(grads(plain), args)
        got = jax.jit(ours)(args), jax.jit(grads(ours))(args)
    assert " dot(" not in text
    assert sum(ours_move.values()) <= sum(theirs_move.values())
    with jax.enable_x64(True):
        wide = {k: v.astype(np.float64) for k, v in values.items()}
        assert_close(got, (plain(wide), grads(plain)(wide)))


def test_explain_says_what_waits_for_the_sum():
    mesh = mesh_of(AxisType.Explicit)
    values = normal(16, 24, seed=0), normal(24, 32, seed=1), normal(32, seed=2)
    f = functools.partial(jax_tcgemm.linear, activation="gelu", implementation="host")
    with jax.set_mesh(mesh):
        specs = P("x"), P(None, "y"), P("y")
        args = [
            jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(values, specs, strict=True)
        ]
        (call,) = jax_tcgemm.explain(f, *args, platform="cpu")
        assert (call.problem.m, call.problem.n) == (8, 16)
        assert "XLA runs the function" in call.why
        args[0] = jax.device_put(values[0], NamedSharding(mesh, P(None, "x")))
        args[1] = jax.device_put(values[1], NamedSharding(mesh, P()))
        (call,) = jax_tcgemm.explain(f, *args, platform="cpu")
    assert "waits for its sum over devices" in call.why
