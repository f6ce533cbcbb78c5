"""The feed-forward block, its fused backward pass, and what policies save of it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import test_util

import jax_tcgemm
from jax_tcgemm import checkpoint_policies
from jax_tcgemm.problem.activations import ACTIVATIONS, canonical_activation
from jax_tcgemm.system import modules

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [None, "host"], ids=["default", "host"])
KINDS = pytest.mark.parametrize("kind", ["plain", "array", "pair"])


def normal(rng, *shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape) / 2, dtype)


def block(kind, dtype="float32", k=8, hidden=12, n=6, batch=(2, 5), biases=True):
    """x, params and residual of a block."""
    rng = np.random.default_rng(7)
    draw = functools.partial(normal, rng, dtype=dtype)
    gated = kind != "plain"
    params = {
        "up": draw(k, 2, hidden) if gated else draw(k, hidden),
        "down": draw(hidden, n),
    }
    if biases:
        params |= {"up_bias": draw(2, hidden) if gated else draw(hidden), "down_bias": draw(n)}
    if kind == "pair":
        params["up"] = params["up"][:, 0], params["up"][:, 1]
    return draw(*batch, k), params, draw(*batch, n)


def unfused(x, params, residual, *, activation="gelu"):
    f, up = ACTIVATIONS[canonical_activation("test", activation)], params["up"]
    bias = params.get("up_bias")
    product = functools.partial(jnp.dot, precision="highest")
    if isinstance(up, tuple) or up.ndim == 3:
        gate, up = up if isinstance(up, tuple) else (up[:, 0], up[:, 1])
        bias = (0.0, 0.0) if bias is None else bias
        h = f(product(x, gate) + bias[0]) * (product(x, up) + bias[1])
    else:
        h = f(product(x, up) + (0.0 if bias is None else bias))
    return product(h, params["down"]) + params.get("down_bias", 0.0) + residual


def ours(x, params, residual, **kwargs):
    return jax_tcgemm.mlp(x, params, residual=residual, **kwargs)


def loss(f):
    return lambda *args: jnp.sum(jnp.sin(f(*args)))


def assert_near(got, expected, rounding=2**-20):
    """Within a few float32 roundings of the largest element, for sums of tens of terms."""

    def check(x, y):
        assert x.shape == y.shape
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        limit = 16 * rounding * max(np.abs(y).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(x, y, rtol=0, atol=limit)

    jax.tree.map(check, got, expected)


@IMPLEMENTATIONS
@KINDS
@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_values_and_gradients_are_those_of_the_expression(activation, kind, implementation):
    args = block(kind)
    f = functools.partial(ours, activation=activation, implementation=implementation)
    g = functools.partial(unfused, activation=activation)
    assert_near(*(jax.jit(h)(*args) for h in (f, g)))
    gradients = [jax.jit(jax.grad(loss(h), (0, 1, 2)))(*args) for h in (f, g)]
    assert_near(*gradients)


@IMPLEMENTATIONS
@KINDS
def test_bfloat16(kind, implementation, x64):
    """Gradients within four roundings, of which the hidden layer alone takes three."""
    args = block(kind, "bfloat16", k=64, hidden=96, n=32, batch=(40,))
    wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, "float64")), args)
    f = functools.partial(ours, implementation=implementation)
    got = jax.jit(jax.grad(lambda *a: jnp.sum(f(*a).astype("float32")), (0, 1)))(*args)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {"bfloat16"}
    expected = jax.jit(jax.grad(lambda *a: jnp.sum(unfused(*a)), (0, 1)))(*wide)
    assert_near(got, expected, rounding=2**-8 / 4)


@KINDS
def test_derivatives_by_finite_differences(kind, x64):
    args = block(kind, "float64", k=3, hidden=4, n=2, batch=(3,))
    f = jax.jit(functools.partial(ours, activation="gelu", implementation="host"))
    test_util.check_grads(f, args, order=2, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "array"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda *args: jax.jvp(f, args, jax.tree.map(jnp.cos, args)),
        lambda f: jax.grad(lambda *args: jnp.sum(jax.grad(loss(f))(*args) ** 2), (0, 1)),
        lambda f: jax.jacfwd(jax.grad(loss(f))),
        lambda f: jax.grad(loss(jax.checkpoint(f)), (0, 1, 2)),
        lambda f: (
            lambda x, p, r: jax.grad(
                lambda x, p: jnp.sum(jax.lax.scan(lambda x, p: (f(x, p, 0 * r), None), x, p)[0]),
                (0, 1),
            )(x, jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p))
        ),
    ],
    ids=["jvp", "grad of grad", "jacfwd of grad", "grad of remat", "grad of scan"],
)
def test_transformations(transform, kind):
    args = block(kind, n=8)
    f = functools.partial(ours, implementation="host")
    assert_near(jax.jit(transform(f))(*args), jax.jit(transform(unfused))(*args))


@KINDS
@pytest.mark.parametrize("in_axes", [(0, None, 0), (None, 0, None), (1, None, 1)])
def test_gradients_of_vmap_and_vmap_of_gradients(in_axes, kind):
    x, params, residual = block(kind)
    if in_axes[1] == 0:
        params = jax.tree.map(lambda a: np.stack([a, np.float32(0.5) * a]), jax.device_get(params))
    f = functools.partial(ours, implementation="host")
    x, residual = (a if in_axes[0] is not None else a[0] for a in (x, residual))
    for transform in (
        lambda f: jax.grad(loss(jax.vmap(f, in_axes)), (0, 1, 2)),
        lambda f: jax.vmap(jax.grad(loss(f), (0, 1, 2)), in_axes),
    ):
        got, expected = (jax.jit(transform(h))(x, params, residual) for h in (f, unfused))
        assert_near(got, expected)


@KINDS
def test_the_backward_pass_is_made_of_fused_products(kind, fake_cuda):
    args = block(kind, "bfloat16", k=64, hidden=96, n=32, batch=(48,))
    f = functools.partial(ours, activation="silu")
    calls = jax_tcgemm.explain(jax.grad(loss(f), (0, 1, 2)), *args, platform="cuda")
    # Up, down, the gradients of h and of each weight and input; twice for a pair.
    assert len(calls) == {"plain": 6, "array": 6, "pair": 8}[kind]
    assert all(call.implementation == "wgmma" for call in calls)
    functions = [call.problem.function for call in calls if call.problem.function]
    up, down, derivative = sorted(functions, key=lambda f: ("beside" in str(f), f.cost.work))[:3]
    gated = kind != "plain"
    by_results = {tuple(x.over for x in f.results): f for f in (up, down, derivative)}
    halves = ("", "beside") if gated else ("",)
    sums = ("rows",) * len(halves)
    assert set(by_results) == {("", *halves), ("",), (*halves, *sums)}
    # Nothing passes over the hidden layer outside the calls.
    text = jax.jit(jax.grad(loss(f), (0, 1))).trace(*args).lower(lowering_platforms=("cuda",))
    assert "stablehlo.logistic" not in text.as_text()


def gemm_attributes(f, *args):
    """The gemm attribute of every custom call of a program for CUDA."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    for gemm in re.findall(r"gemm = \{([^}]*)\}", text):
        pairs = re.findall(r'(\w+) = ("[^"]*"|[^,: ]+)', gemm)
        found.append({name: value.strip('"') for name, value in pairs})
    return found


def test_what_cuda_gets_of_a_gated_block(fake_cuda):
    x, params, residual = block("array", "bfloat16", k=64, hidden=96, n=32, batch=(3, 16))
    f = functools.partial(ours, activation="silu")

    def both_ways(*args):
        out, pull = jax.vjp(f, *args)
        return out, pull(residual)

    calls = gemm_attributes(both_ways, x, params, residual)
    (up,) = (a for a in calls if a["gated"] == "true")
    down, derivative = (a for a in calls if a["function"] and a is not up)
    rest = [a for a in calls if not a["function"]]

    def said(attributes):
        return [attributes[name] for name in ("m", "n", "k", "up_offset", "b_transposed")]

    assert said(up) == ["48", "96", "64", "96", "false"]
    assert said(down) == ["48", "32", "96", "0", "false"]
    assert said(derivative) == ["48", "96", "32", "0", "true"]
    # The gradients of down, up (gate and up in one) and x.
    assert sorted((a["m"], a["n"], a["k"]) for a in rest) == [
        ("48", "64", "192"),
        ("64", "192", "48"),
        ("96", "32", "48"),
    ]


def test_gradients_that_are_not_asked_for_are_not_computed():
    x, params, residual = block("array")
    f = functools.partial(ours, implementation="host")
    for argnums, count in ((0, 4), (2, 2)):
        calls = jax_tcgemm.explain(
            lambda *args: jax.jit(jax.grad(loss(f), argnums))(*args),  # noqa: B023
            x,
            params,
            residual,
        )
        used = [c for c in calls if c.problem is not None]
        assert len(used) <= count


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@KINDS
def test_weight_gradients_accumulate_over_microbatches(kind, dtype, implementation):
    x, params, residual = block(kind, dtype, batch=(3, 16))
    weights = {name: params[name] for name in ("up", "down")}
    buffers = jax.tree.map(lambda w: jnp.full(w.shape, 0.5, jnp.float32), weights)
    f = functools.partial(ours, implementation=implementation)

    def microbatch(buffers, batch):
        def value(buffers, x, residual):
            return jnp.sum(f(x, params, residual, accumulate=buffers).astype(jnp.float32))

        return jax.grad(value)(buffers, *batch), None

    got, _ = jax.jit(lambda b: jax.lax.scan(microbatch, b, (x, residual)))(buffers)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got))
    wide = jax.tree.map(lambda a: np.asarray(a, "float32"), (x, params, residual))
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(unfused(wide[0], p, wide[2]))))(wide[1])
    expected = jax.tree.map(lambda g: np.asarray(g) + np.float32(0.5), gradient)
    expected = {name: expected[name] for name in weights}
    assert_near(got, expected, rounding=2**-20 if dtype == "float32" else 2**-8 / 4)


def test_a_pair_of_weights_and_of_buffers_may_be_a_list():
    x, params, _ = block("pair")
    params["up"] = list(params["up"])

    def gradient(buffers):
        f = jax.grad(lambda b: jnp.sum(jax_tcgemm.mlp(x, params, accumulate=b)))
        return jax.jit(f)(buffers)

    as_list, as_tuple = (
        gradient({"up": kind(jnp.ones_like(w) for w in params["up"])})["up"]
        for kind in (list, tuple)
    )
    jax.tree.map(np.testing.assert_array_equal, tuple(as_list), as_tuple)


def test_accumulation_is_one_product_for_each_weight_in_the_buffers_place():
    x, params, _ = block("array", "bfloat16", batch=(16,))
    buffers = {name: jnp.zeros(params[name].shape, jnp.float32) for name in ("up", "down")}

    def f(buffers, x):
        def value(buffers):
            out = jax_tcgemm.mlp(x, params, accumulate=buffers, implementation="host")
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(value)(buffers)

    calls = jax_tcgemm.explain(f, buffers, x)
    sums = [call.problem for call in calls if call.problem.beta]
    assert [(p.in_dtype, p.out_dtype, p.k) for p in sums] == [("bf16", "f32", 16)] * 2
    compiled = jax.jit(f, donate_argnums=0).lower(buffers, x).compile()
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased == sum(b.nbytes for b in buffers.values())


@pytest.mark.parametrize("kind", ["plain", "array"])
def test_the_cotangent_of_the_preactivation_needs_no_memory_of_its_own(kind, fake_cuda):
    x, params, _ = block(kind, "bfloat16", k=64, hidden=96, n=32, batch=(48,))

    def f(x, params):
        return jnp.sum(jax_tcgemm.mlp(x, params))

    lowered = jax.jit(jax.grad(f, (0, 1))).trace(x, params).lower(lowering_platforms=("cuda",))
    calls = re.findall(r"@tcgemm_gemm.*", lowered.as_text())
    (in_place,) = (call for call in calls if "output_operand_alias" in call)
    assert "k = 32 : i64" in in_place
    assert "n = 96 : i64" in in_place


@pytest.mark.parametrize("kind", ["plain", "array"])
def test_a_pullback_that_is_used_twice_finds_the_preactivation_as_it_was(kind):
    x, params, residual = block(kind, batch=(16,))

    @functools.partial(jax.jit, static_argnums=0)
    def twice(f, first, second):
        _, pull = jax.vjp(lambda x, params: f(x, params, residual), x, params)
        return pull(first), pull(second)

    cotangents = [jnp.full(residual.shape, value) for value in (1.0, -0.5)]
    got = twice(functools.partial(ours, implementation="host"), *cotangents)
    assert_near(got, twice(unfused, *cotangents), rounding=2**-20)


@pytest.mark.parametrize("policy", ["dots_saveable", "dots_with_no_batch_dims_saveable"])
@pytest.mark.parametrize("products", ["matmul", "linear", "mlp"])
def test_policies_save_what_they_would_of_jax(products, policy):
    x, params, residual = block("plain", n=8)
    functions = {
        "matmul": lambda x, p: jnp.sin(jax_tcgemm.matmul(jnp.sin(x), p["up"])),
        "linear": lambda x, p: jax_tcgemm.linear(jnp.sin(x), p["up"], activation="silu"),
        "mlp": lambda x, p: jax_tcgemm.mlp(jnp.sin(x), p, residual=residual),
    }

    def num_products(policy):
        f = jax.checkpoint(functions[products], policy=policy)
        jaxpr = str(jax.make_jaxpr(jax.grad(loss(f), (0, 1)))(x, params))
        return sum(jaxpr.count(f"{name}[") for name in ("dot_general", "epilogue_product"))

    saving = num_products(getattr(checkpoint_policies, policy))
    assert saving == num_products(jax.checkpoint_policies.everything_saveable)
    assert saving < num_products(getattr(jax.checkpoint_policies, policy))
    assert num_products(jax.checkpoint_policies.nothing_saveable) > saving


def test_policies_know_jax_and_batch_dimensions_too():
    a = jnp.ones((3, 4, 4))

    def num_products(product, policy):
        f = jax.checkpoint(lambda a: jnp.sin(product(a, a)).sum(), policy=policy)
        jaxpr = str(jax.make_jaxpr(jax.grad(f))(a))
        return sum(jaxpr.count(f"{name}[") for name in ("dot_general", "contract", "blas"))

    einsum = functools.partial(jax_tcgemm.tensor.einsum, "bij,bjk->bik")
    for f in (jnp.matmul, jax_tcgemm.matmul, einsum, jax_tcgemm.blas.gemm):
        assert num_products(f, checkpoint_policies.dots_saveable) == 3
        assert num_products(f, checkpoint_policies.dots_with_no_batch_dims_saveable) == 4
    offload = checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    theirs = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    batch, none = (((2,), (1,)), ((0,), (0,))), (((2,), (0,)), ((), ()))
    primitive = jax_tcgemm.primitives.dot_general.dot_general_p
    for numbers in (batch, none):
        expected = theirs(jax.lax.dot_general_p, dimension_numbers=numbers)
        assert repr(offload(primitive, dimension_numbers=numbers)) == repr(expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"params": [1, 2]}, TypeError, "mlp: params must be a mapping"),
        ({"up": None}, ValueError, "params must have up and down"),
        ({"gate": 1}, ValueError, "params must have up and down, and may have"),
        (
            {"up": jnp.ones((9, 12))},
            ValueError,
            "the last dimension of x must equal the first of up",
        ),
        ({"up": jnp.ones((8, 3, 12))}, ValueError, "up must be an array of shape"),
        ({"down": jnp.ones((13, 6))}, ValueError, r"down must have shape \(12, n\)"),
        ({"up_bias": jnp.ones((2, 12))}, ValueError, r"up_bias must have shape \(12,\)"),
        ({"down_bias": jnp.ones(7)}, ValueError, r"down_bias must have shape \(6,\)"),
        ({"accumulate": {"up_bias": 1}}, ValueError, "accumulate must be a mapping with up, down"),
        (
            {"accumulate": {"up": jnp.ones((8, 11))}},
            ValueError,
            r"accumulate\['up'\] must be like up",
        ),
        ({"residual": jnp.ones((3, 6))}, ValueError, "residual must broadcast"),
        ({"residual": 1j}, TypeError, "residual must be of a kind that the result can hold"),
        ({"up_bias": 1j * jnp.ones(12)}, TypeError, "up_bias must be of a kind"),
        ({"activation": "swish"}, ValueError, "mlp: activation must be"),
        ({"implementation": "fast"}, ValueError, "mlp: implementation must be one of"),
    ],
)
def test_errors(change, error, message):
    x, params, _ = block("plain")
    kwargs = {k: v for k, v in change.items() if k not in ("params", "gate", *params)}
    params = params | {k: v for k, v in change.items() if k in ("gate", *params)}
    params = change.get("params", {k: v for k, v in params.items() if v is not None})
    with pytest.raises(error, match=message):
        jax_tcgemm.mlp(x, params, **kwargs)


@pytest.mark.skipif(modules.cuda is None, reason="this build has no CUDA module")
def test_derivatives_of_gate_and_up_are_fused_beside_sums_for_their_biases():
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    params = {"up": bf16((4096, 2, 4096)), "up_bias": bf16((2, 4096)), "down": bf16((4096, 4096))}

    def loss(params, x):
        return jax_tcgemm.mlp(x, params, activation="silu").astype(jnp.float32).sum()

    report = jax_tcgemm.explain(jax.grad(loss), params, bf16((4096, 4096)), platform="cuda")
    (call,) = (x for x in report if x.epilogue == ("split", "silu", "mul", "stack"))
    assert call.implementation == "wgmma"
    assert call.problem.function is not None
