"""`out_sharding` of what is more than a product, over explicit mesh axes of eight CPU devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import assert_close, compiled, mesh_of, normal

import jax_tcgemm
from jax_tcgemm import tensor

# Shardings of x (m, k), w (k, n), the bias (n,) and the result (m, n), which the residual has, too,
# and the collectives of the layer.
CASES = {
    "m": (P("x"), P(), P(), P("x"), {}),
    "n": (P(), P(None, "x"), P("x"), P(None, "x"), {}),
    "m, n": (P("x"), P(None, "y"), P("y"), P("x", "y"), {}),
    "result": (P(), P(), P(), P("x", "y"), {}),
    "k": (P(None, "x"), P("x"), P(), P(), {"all-reduce": 1}),
    "k, result m": (P(None, "x"), P("x"), P(), P("x"), {"reduce-scatter": 1}),
    "k, result n": (P(None, "x"), P("x"), P("x"), P(None, "x"), {"reduce-scatter": 1}),
    "m, n, k": (P("y", "x"), P("x", "z"), P("z"), P("y", "z"), {"all-reduce": 1}),
}
SHARDINGS = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def put(mesh, values, specs):
    def place(value, spec):
        return jax.device_put(value, NamedSharding(mesh, spec))

    return jax.tree.map(place, values, specs, is_leaf=lambda x: isinstance(x, P))


def assert_divided_alike(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def gradients(f, args):
    argnums = tuple(range(len(args)))
    return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), argnums)(*args)


def result_and_gradients(f, args):
    """The function and its gradients, each of a jit of its own."""
    return jax.jit(f)(*args), jax.jit(lambda *args: gradients(f, args))(*args)


def expected(f, values):
    """The function and its gradients in float64, on one device."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda v: jnp.asarray(v, np.float64), values)
        return jax.tree.map(np.asarray, (f(*wide), gradients(f, wide)))


def matmul_kind(f, x, w, bias, residual, **out):
    return f(x, w, bias=bias, activation="gelu_tanh", residual=residual, alpha=0.5, **out)


def gated_kind(f, x, w, bias, residual, **out):
    return f(x, w, bias=bias, residual=residual, **out)


def reference_layer(x, w, bias, residual):
    return jax.nn.gelu(0.5 * (x @ w) + bias) + residual


def reference_gated(x, w, bias, residual):
    gate, up = (w[:, 0], w[:, 1]) if not isinstance(w, tuple) else w
    return jax.nn.silu(x @ gate + bias[0]) * (x @ up + bias[1]) + residual


LAYERS = {
    "linear": (functools.partial(matmul_kind, jax_tcgemm.linear), reference_layer),
    "matmul": (functools.partial(matmul_kind, jax_tcgemm.matmul), reference_layer),
    "gated": (functools.partial(gated_kind, jax_tcgemm.gated_linear), reference_gated),
    "pair": (functools.partial(gated_kind, jax_tcgemm.gated_linear), reference_gated),
}


def layer_arguments(kind, case):
    """Values and specs of x, w, bias and residual."""
    x_spec, w_spec, bias_spec, out, _ = case
    x, residual = normal(16, 24, seed=0), normal(16, 32, seed=3)
    w, bias = normal(24, 32, seed=1) / 4, normal(32, seed=2)
    if kind in ("gated", "pair"):
        up, bias_spec = normal(24, 32, seed=4) / 4, P(None, *bias_spec)
        bias = normal(2, 32, seed=2)
        k, n = (*w_spec, None, None)[:2]
        w, w_spec = (
            ((w, up), (w_spec,) * 2)
            if kind == "pair"
            else (
                np.stack((w, up), 1),
                P(k, None, n),
            )
        )
    return (x, w, bias, residual), (x_spec, w_spec, bias_spec, out)


@SHARDINGS
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind, case):
    """What follows the product comes once, after the sum over devices, and inside the call if none.

    The result and the gradients are divided as they were asked to be and as what they are of.
    """
    *_, out, collectives = case
    layer, reference = LAYERS[kind]
    values, specs = layer_arguments(kind, case)
    layer = functools.partial(layer, out_sharding=out, implementation="host")
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = put(mesh, values, specs)
        text, found = compiled(layer, *args)
        got, grads = result_and_gradients(layer, args)
        calls = jax_tcgemm.explain(layer, *args, platform="cpu")
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
    assert_divided_alike(grads, args)
    assert_close((got, grads), expected(reference, values))
    assert " dot(" not in text
    assert found == collectives
    assert {"waits for its sum over devices" in c.why for c in calls} == {bool(collectives)}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("spec", [None, "z"], ids=["whole", "divided"])
def test_vmap(kind, spec):
    """A mapped dimension that is divided itself stays so, beside what `out_sharding` says."""
    case = (P("y", "x"), P("x"), P(), P(None, "x"), None)
    layer, reference = LAYERS[kind]
    values, specs = layer_arguments(kind, case)
    in_axes = (0, None, None, 0)
    values = tuple(
        v if axis is None else np.stack([v, -v, v / 2, v[::-1]])
        for v, axis in zip(values, in_axes, strict=True)
    )
    specs = tuple(
        s if axis is None else P(spec, *s) for s, axis in zip(specs, in_axes, strict=True)
    )
    layer = functools.partial(layer, out_sharding=P("y", "x"), implementation="host")
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = put(mesh, values, specs)
        got, grads = result_and_gradients(jax.vmap(layer, in_axes), args)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P(spec, "y", "x")), 3)
    assert_close((got, grads), expected(jax.vmap(reference, in_axes), values))


@pytest.mark.parametrize("argnum", range(4), ids=["x", "w", "bias", "residual"])
def test_one_gradient_alone(argnum):
    """Of a contraction that is divided, by an operand that may be divided unlike the result."""
    case = (P("y", "x"), P("x"), P("z"), P("y", "z"), None)
    values, specs = layer_arguments("linear", case)
    layer, reference = LAYERS["linear"]
    layer = functools.partial(layer, out_sharding=P("y"), implementation="host")

    def grad(f, args):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), argnum)(*args)

    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = put(mesh, values, (*specs[:2], P(), P("y")))
        got = jax.jit(lambda *args: grad(layer, args))(*args)
        assert got.sharding.is_equivalent_to(args[argnum].sharding, got.ndim)
    assert_close(got, expected(reference, values)[1][argnum])


@pytest.mark.parametrize("what", ["bias", "residual", "gated", "mlp", "contract", "reduce"])
def test_tangents_are_divided_as_results(what):
    """By an operand that is divided along fewer axes; so the cotangent of the result pulls back."""
    x, w, down = normal(8, 4, seed=0), normal(4, 6, seed=1), normal(6, 4, seed=2)

    def f(x, w, down, v, **out):
        match what:
            case "bias":
                return jax_tcgemm.linear(x, w, v)
            case "residual":
                return jax_tcgemm.linear(x, w, residual=v)
            case "gated":
                return jax_tcgemm.gated_linear(x, (w, 2 * w), bias=v)
            case "mlp":
                return jax_tcgemm.mlp(x, {"up": w, "down": down}, residual=v, **out)
            case "contract":
                return tensor.contract("mk,kn->mn", x, w, c=v, beta=2.0)
            case "reduce":
                return tensor.reduce("mk->m", x, c=v, beta=2.0)

    def pushed_and_pulled(x, w, down, v, **out):
        def of_one(v):
            return f(x, w, down, v, **out)

        result, tangent = jax.jvp(of_one, (v,), (jnp.cos(v),))
        (cotangent,) = jax.vjp(of_one, v)[1](result)
        return result, tangent, cotangent

    shapes = {"bias": (6,), "gated": (2, 6), "mlp": (8, 4), "reduce": (8,)}
    values = x, w, down, normal(*shapes.get(what, (8, 6)), seed=3)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = put(mesh, values, (P("x"), P(None, "y"), P("y"), P()))
        got = jax.jit(functools.partial(pushed_and_pulled, out_sharding=P("x")))(*args)
        assert got[0].sharding.spec[0] == "x"
        assert_divided_alike(got[1:], (got[0], args[3]))
    assert_close(got, jax.jit(pushed_and_pulled)(*values))


@pytest.mark.parametrize("subscripts", ["mk->k", "mk->m", "mk->"])
def test_the_gradient_of_a_sum_over_a_divided_mode(subscripts):
    def grad(f, x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(f(subscripts, x))))(x)

    x = normal(8, 4, seed=0)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        (placed,) = put(mesh, (x,), (P("x"),))
        got = jax.jit(functools.partial(grad, tensor.reduce))(placed)
        assert_divided_alike(got, placed)
    assert_close(got, grad(jnp.einsum, x))


@pytest.mark.parametrize("gated", ["", "gated", "pair"])
@pytest.mark.parametrize("out", [P("data"), P(("data", "model"))], ids=str)
def test_a_tensor_parallel_block(gated, out):
    """Up by columns, down by rows: one collective forwards, and gradients, also accumulated."""
    mesh = mesh_of(AxisType.Explicit, (2, 4), ("data", "model"))
    pair = (2,) if gated else ()
    up, columns = normal(12, *pair, 16, seed=1) / 3, P(None, *(None for _ in pair), "model")
    if gated == "pair":
        up, columns = (up[:, 0], up[:, 1]), (P(None, "model"),) * 2
    values = {
        "up": up,
        "up_bias": normal(*pair, 16, seed=2),
        "down": normal(16, 12, seed=3) / 3,
        "down_bias": normal(12, seed=4),
    }
    specs = {"up": columns, "up_bias": P(), "down": P("model"), "down_bias": P()}
    values, specs = (normal(8, 12, seed=0), values), (P("data"), specs)

    def ours(x, params, **more):
        how = {"activation": "silu", "out_sharding": out, "implementation": "host"}
        return jax_tcgemm.mlp(x, params, **how, **more)

    def plain(x, params):
        up, bias = params["up"], params["up_bias"]
        if isinstance(up, tuple):
            up = jnp.stack(up, 1)
        z = jnp.tensordot(x, up, 1) + bias
        h = jax.nn.silu(z[:, 0]) * z[:, 1] if gated else jax.nn.silu(z)
        return h @ params["down"] + params["down_bias"]

    def accumulated(x, params, buffers):
        return jnp.sum(jnp.sin(ours(x, params, accumulate=buffers)))

    with jax.set_mesh(mesh):
        args = put(mesh, values, specs)
        weights = {name: args[1][name] for name in ("up", "down")}
        text, found = compiled(ours, *args)
        got, grads = result_and_gradients(ours, args)
        sums = jax.jit(jax.grad(accumulated, 2))(*args, jax.tree.map(lambda w: 3 * w, weights))
    assert " dot(" not in text
    assert found == {"all-reduce" if out == P("data") else "reduce-scatter": 1}
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
    result, expected_grads = expected(plain, values)
    assert_close((got, grads), (result, expected_grads))
    expected_sums = jax.tree.map(
        lambda g, w: g + 3 * w,
        {name: expected_grads[1][name] for name in weights},
        {name: values[1][name] for name in weights},
    )
    assert_close(sums, expected_sums)
    assert_divided_alike((grads, sums), (args, weights))


def test_a_block_whose_axes_collide():
    """Weights divided over the axis of the tokens are gathered; the tokens stay where they are."""
    mesh = mesh_of(AxisType.Explicit, (2, 4), ("data", "model"))
    values = (normal(8, 12, seed=0), normal(12, 16, seed=1) / 3, normal(16, 12, seed=2) / 3)

    def ours(x, up, down):
        params = {"up": up, "down": down}
        return jax_tcgemm.mlp(x, params, activation="silu", out_sharding=P("data"))

    with jax.set_mesh(mesh):
        args = put(mesh, values, (P("data"), P("model", "data"), P("data", "model")))
        got, grads = result_and_gradients(ours, args)
    assert_close((got, grads), expected(lambda x, up, down: jax.nn.silu(x @ up) @ down, values))


EINSUMS = {
    "k": ("ij,jk->ik", [P("x", "y"), P("y")], P("x"), {"all-reduce": 1}),
    "k, result n": ("ij,jk->ki", [P("x", "y"), P("y")], P("y", "x"), {"reduce-scatter": 1}),
    "batch": ("bij,bkj->bik", [P("x"), P("x")], P("x"), {}),
    "m, n": ("ij,jk->ki", [P("x"), P(None, "y")], P("y", "x"), {}),
    "outer": ("ij,kl->ikjl", [P("x"), P("y")], P("x", "y"), {}),
    "chain": ("ij,jk,kl->il", [P("x", "y"), P("y"), P()], P("x"), {"all-reduce": 1}),
    "one": ("ij->ji", [P("x", "y")], P("y", "x"), {}),
}


@pytest.mark.parametrize("case", EINSUMS.values(), ids=EINSUMS.keys())
def test_einsum(case):
    subscripts, specs, out, collectives = case
    extents = dict(zip("bijkl", (4, 8, 12, 16, 20), strict=True))
    terms = subscripts.partition("->")[0].split(",")
    values = [normal(*map(extents.get, term), seed=i) / 3 for i, term in enumerate(terms)]
    ours = functools.partial(tensor.einsum, subscripts, out_sharding=out)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = put(mesh, values, specs)
        _, found = compiled(ours, *args)
        got, grads = result_and_gradients(ours, args)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, out), got.ndim)
    assert_divided_alike(grads, args)
    assert found == collectives
    assert_close((got, grads), expected(functools.partial(jnp.einsum, subscripts), values))


@pytest.mark.parametrize("implementation", [None, "gemm", "xla"])
def test_contract(monkeypatch, implementation):
    """C is added once, after the sum; by whatever runs the contraction, and mapped."""
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", "host")  # the choice, whatever the processor
    mesh = mesh_of(AxisType.Explicit)
    a, b, c = normal(3, 8, 12, seed=0), normal(12, 16, seed=1), normal(3, 16, 8, seed=2)

    def ours(a, b, c):
        how = {"alpha": 0.5, "beta": 2, "implementation": implementation}
        return tensor.contract("ij,jk->ki", a, b, c=c, out_sharding=P(None, "x"), **how)

    def plain(a, b, c):
        return 0.5 * (a @ b).T + 2 * c

    in_axes = (0, None, 0)
    with jax.set_mesh(mesh):
        args = put(mesh, (a, b, c), (P(None, "x", "y"), P("y"), P()))
        text, found = compiled(jax.vmap(ours, in_axes), *args)
        got, grads = result_and_gradients(jax.vmap(ours, in_axes), args)
    assert (" dot(" in text) == (implementation == "xla")
    assert found == {"all-reduce": 1}
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P(None, None, "x")), 3)
    assert_close((got, grads), expected(jax.vmap(plain, in_axes), (a, b, c)))


@pytest.mark.parametrize(
    ("x_spec", "w_spec", "out", "gathered"),
    [
        (P("x"), P(), P("x"), False),
        (P(), P("x"), P("y"), False),
        (P(), P("x"), P("x"), True),
        (P(None, "x"), P(None, "x"), P("x", "y"), False),
        (P("y"), P("x", None, None, "z"), P("y", "z"), False),
        (P("y"), P("x", None, None, "z"), P("y", "z"), True),
    ],
    ids=["tokens", "experts", "gathered", "k", "tokens, experts, columns", "gathered, all"],
)
def test_gated_ragged_linear(x_spec, w_spec, out, gathered):
    """Where k is divided it is gathered, since what follows cannot wait for a sum by groups."""
    mesh = mesh_of(AxisType.Explicit)
    sizes = np.array([5, 0, 9, 3, 1, 8, 2, 2], np.int32)
    values = normal(32, 6, seed=0), normal(8, 6, 2, 10, seed=1), normal(8, 2, 10, seed=2)

    order = np.random.default_rng(3).permutation(32).astype(np.int32) if gathered else None
    gated = functools.partial(
        jax_tcgemm.gated_ragged_linear, group_sizes=sizes, gather_indices=order
    )

    def ours(x, w, bias):
        return gated(x, w, bias=bias, out_sharding=out, implementation="host")

    with jax.set_mesh(mesh):
        args = put(mesh, values, (x_spec, w_spec, P()))
        text, _ = compiled(ours, *args)
        got, grads = result_and_gradients(ours, args)
    assert 'custom_call_target="tcgemm_ragged"' in text
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
    x, w, bias = values
    x = x[order] if gathered else x
    gate, up = (
        ragged_reference.rows(x, w[:, :, i], sizes)
        + ragged_reference.rows(np.ones((32, 1)), bias[:, None, i], sizes)
        for i in range(2)
    )
    assert_close(got, gate / (1 + np.exp(-gate)) * up)
    assert_close(grads, gradients(lambda x, w, b: gated(x, w, bias=b), values))


ERRORS = {
    "kind": ("x", TypeError, "out_sharding must be a NamedSharding, a PartitionSpec or None"),
    "too long": (P("x", None, None), ValueError, "out_sharding must have an entry for each dim"),
    "unknown axis": (P("w"), ValueError, "Resource axis: w"),
}
FUNCTIONS = {
    "dot_general": lambda x, out: jax_tcgemm.dot_general(
        x, x, (((1,), (1,)), ((), ())), out_sharding=out
    ),
    "matmul": lambda x, out: jax_tcgemm.matmul(x, x.T, bias=x[0, 0], out_sharding=out),
    "linear": lambda x, out: jax_tcgemm.linear(x, x.T, out_sharding=out),
    "gated_linear": lambda x, out: jax_tcgemm.gated_linear(x, (x.T, x.T), out_sharding=out),
    "mlp": lambda x, out: jax_tcgemm.mlp(x, {"up": x.T, "down": x}, out_sharding=out),
    "tensor.einsum": lambda x, out: tensor.einsum("ij,kj->ik", x, x, out_sharding=out),
    "tensor.contract": lambda x, out: tensor.contract("ij,kj->ik", x, x, out_sharding=out),
    "ragged_dot": lambda x, out: jax_tcgemm.ragged_dot(
        x, x.T[None], jnp.array([3]), out_sharding=out
    ),
    "gated_ragged_linear": lambda x, out: jax_tcgemm.gated_ragged_linear(
        x, jnp.ones((1, 8, 2, 4)), jnp.array([3]), out_sharding=out
    ),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())
@pytest.mark.parametrize("op", FUNCTIONS)
def test_errors(op, error):
    out, kind, message = error
    x = jnp.ones((8, 8))
    with jax.set_mesh(mesh_of(AxisType.Explicit)), pytest.raises(kind, match=message) as raised:
        FUNCTIONS[op](x, out)
    assert "Resource" in message or str(raised.value).startswith(f"{op}: ")


@pytest.mark.parametrize("op", FUNCTIONS)
def test_automatic_axes_are_xlas(op):
    with (
        jax.set_mesh(mesh_of(AxisType.Auto)),
        pytest.raises(ValueError, match=f"^{op}: out_sharding must name explicit mesh axes only"),
    ):
        FUNCTIONS[op](jnp.ones((8, 8)), P("x"))


def test_a_mesh_of_one_device():
    """The types are divided, and nothing else is: one call, and nothing is exchanged."""
    mesh = mesh_of(AxisType.Explicit, (1,), ("x",))
    case = (P(None, "x"), P("x"), P(), P("x"), None)
    values, specs = layer_arguments("linear", case)
    layer, reference = LAYERS["linear"]
    layer = functools.partial(layer, out_sharding=P("x"), implementation="host")
    with jax.set_mesh(mesh):
        args = put(mesh, values, specs)
        text, found = compiled(layer, *args)
        got, grads = jax.jit(layer)(*args), gradients(layer, args)
    assert text.count('custom_call_target="tcgemm_gemm"') == 1
    assert not found
    assert_close((got, grads), expected(reference, values))
