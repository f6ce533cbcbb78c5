"""`accelerate` of gated layers: two products of one operand, or a stacked product, as one call."""

import re

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import check, check_every_product, equations, groups, kinds, names
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from library_modules import of_equinox, of_haiku, of_linen, of_nnx
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.problem.call_options import RoundingsRemoved

# A program that is not rewritten is a warning.
pytestmark = pytest.mark.filterwarnings("error:accelerate:RuntimeWarning")

M, K, N = 12, 8, 16
X = normal(2, 6, K)


# --- stock modules --------------------------------------------------------------------------------


class NnxSwiGLU(nnx.Module):
    """As of Llama."""

    def __init__(self, rngs, dtype=None, use_bias=False):
        how = {"rngs": rngs, "dtype": dtype, "use_bias": use_bias}
        self.gate, self.up = nnx.Linear(K, N, **how), nnx.Linear(K, N, **how)
        self.down = nnx.Linear(N, K, **how)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class LinenGeGLU(nn.Module):
    """As of Gemma in Flax."""

    @nn.compact
    def __call__(self, x):
        gate, up = (nn.Dense(N, use_bias=False)(x) for _ in range(2))
        return nn.Dense(K, use_bias=False)(nn.gelu(gate) * up)


class LinenPacked(nn.Module):
    """With one array of weights of two dimensions for columns."""

    @nn.compact
    def __call__(self, x):
        h = nn.DenseGeneral((2, N))(x)
        return nn.Dense(K)(nn.silu(h[..., 0, :]) * h[..., 1, :])


class LinenStacked(nn.Module):
    """With one matrix of weights after the other, as of Gemma's checkpoints."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (2, K, N))
        h = jnp.einsum("...F,NFH->...NH", x, w)
        return nn.Dense(K)(nn.gelu(h[..., 0, :]) * h[..., 1, :])


class LinenUnstacked(nn.Module):
    """With one array of weights, whose two are what the result begins with."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (K, 2, N))
        gate, up = jnp.einsum("btk,kcj->cbtj", x, w)
        return nn.Dense(K)(nn.silu(gate) * up)


class LinenGLU(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(K)(nn.glu(nn.Dense(2 * N)(x)))


class EquinoxSwiGLU(eqx.Module):
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, use_bias):
        keys = jax.random.split(jax.random.key(2), 3)
        sizes = (K, N), (K, N), (N, K)
        layers = [
            eqx.nn.Linear(*size, use_bias=use_bias, key=key)
            for size, key in zip(sizes, keys, strict=True)
        ]
        self.gate, self.up, self.down = layers

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class EquinoxStacked(eqx.Module):
    """As of gpt-oss, whose columns alternate."""

    both: eqx.nn.Linear
    down: eqx.nn.Linear
    alternates: bool

    def __init__(self, use_bias, alternates=False):
        self.alternates = alternates
        keys = jax.random.split(jax.random.key(3))
        self.both = eqx.nn.Linear(K, 2 * N, use_bias=use_bias, key=keys[0])
        self.down = eqx.nn.Linear(N, K, use_bias=use_bias, key=keys[1])

    def __call__(self, x):
        h = self.both(x)
        gate, up = (h[::2], h[1::2]) if self.alternates else jnp.split(h, 2)
        return self.down(jnp.clip(gate, max=7) * jax.nn.sigmoid(1.702 * gate) * (up + 1))


def haiku_stacked(x):
    h = hk.Linear(2 * N)(x)
    return hk.Linear(K)(jax.nn.silu(h[..., :N]) * h[..., N:])


def haiku_two(x):
    gate, up = hk.Linear(N, with_bias=False)(x), hk.Linear(N, with_bias=False)(x)
    return hk.Linear(K, with_bias=False)(jax.nn.silu(gate) * up)


# Name: what makes a function, parameters; and the kind of the call that its first layer is.
MODULES = {
    "nnx SwiGLU": (lambda: of_nnx(NnxSwiGLU), "two"),
    "nnx SwiGLU with biases": (lambda: of_nnx(lambda rngs: NnxSwiGLU(rngs, use_bias=True)), "two"),
    "nnx SwiGLU bfloat16": (lambda: of_nnx(lambda rngs: NnxSwiGLU(rngs, jnp.bfloat16)), "two"),
    "linen GeGLU": (lambda: of_linen(LinenGeGLU), "two"),
    "linen DenseGeneral": (lambda: of_linen(LinenPacked), "stacked"),
    "linen stacked": (lambda: of_linen(LinenStacked), "stacked"),
    "linen unstacked": (lambda: of_linen(LinenUnstacked), "stacked"),
    "linen glu": (lambda: of_linen(LinenGLU), "stacked"),
    "equinox SwiGLU with biases": (lambda: of_equinox(EquinoxSwiGLU(True), num_maps=2), "two"),
    "equinox SwiGLU": (lambda: of_equinox(EquinoxSwiGLU(False), num_maps=2), "two"),
    "equinox stacked with biases": (
        lambda: of_equinox(EquinoxStacked(True), num_maps=2),
        "stacked",
    ),
    "equinox stacked": (lambda: of_equinox(EquinoxStacked(False), num_maps=2), "stacked"),
    "equinox alternating with biases": (
        lambda: of_equinox(EquinoxStacked(True, alternates=True), num_maps=2),
        "stacked",
    ),
    "equinox alternating": (
        lambda: of_equinox(EquinoxStacked(False, alternates=True), num_maps=2),
        "stacked",
    ),
    "haiku stacked": (lambda: of_haiku(lambda: haiku_stacked), "stacked"),
    "haiku two": (lambda: of_haiku(lambda: haiku_two), "two"),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    """Forwards nothing but the gated result is stored; for gradients both products are, too."""
    make, kind = MODULES[name]
    f, _, parameters = make()
    tolerance = 2**-6 if "bfloat16" in name else 1e-5
    check(f, parameters, X, tolerance=tolerance)
    check_every_product(f, parameters, X)
    first, *_ = groups(f, parameters, X)
    assert kinds([first]) == [kind]
    assert [x.aval.shape for x in first.outvars] == [(2, 6, N)]

    step = jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(f(p, x)).astype(jnp.float32)), (0, 1))
    check(step, parameters, X, tolerance=2**-5 if "bfloat16" in name else 1e-4)
    check_every_product(step, parameters, X)
    first, *rest = groups(step, parameters, X)
    assert kinds([first]) == [kind]
    assert [x.aval.shape for x in first.outvars] == [(2, 6, N)] * 3
    # The derivatives of gate and up are results of the call of the product before, which reads gate
    # and up: two results, or one concatenated result if gate and up are column blocks. If gate and
    # up are interleaved, or the first dimension of a result, an XLA loop concatenates them.
    are_fused = name not in ("linen unstacked", *(x for x in MODULES if "alternating" in x))
    backward = [eqn for eqn in rest if len(eqn.invars) == 4]
    sizes = [[x.aval.size for x in eqn.outvars if x.aval.size > N] for eqn in backward]
    assert [(len(eqn.invars), found) for eqn, found in zip(backward, sizes, strict=True)] == (
        [(4, [12 * N] * 2 if kind == "two" else [24 * N])] * are_fused
    )
    assert _concatenates(step, parameters, X) == (not are_fused)
    # The derivatives of biases are sums of the derivatives of gate and up.
    sums = [x.aval.shape for eqn in backward for x in eqn.outvars if x.aval.size <= N]
    has_biases = "bias" in name or name in ("linen DenseGeneral", "linen glu", "haiku stacked")
    assert sums == [(N,)] * (2 if has_biases and are_fused else 0)


def _concatenates(f, *args):
    """Return whether XLA concatenates or interleaves arrays of the size of a gate."""
    found = [eqn for eqn in equations(f, *args) if eqn.primitive.name in ("pad", *CONCATENATIONS)]
    return any(x.aval.size > 2 * N for eqn in found for x in eqn.outvars)


CONCATENATIONS = ("concatenate", "stack")


def scanned(weights, x):
    def layer(x, weights):
        gate, up, down = weights
        return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down, None

    return jax.lax.scan(layer, x, weights)[0]


def test_layers_of_a_scan():
    weights = normal(3, K, N) / 4, normal(3, K, N, seed=1) / 4, normal(3, N, K, seed=2) / 4
    step = jax.value_and_grad(lambda w: jnp.sum(scanned(w, X) ** 2))
    for f, args in ((scanned, (weights, X)), (step, (weights,))):
        check(f, *args, tolerance=1e-4)
        check_every_product(f, *args)
        assert "num_rhs=2" in str(jax.make_jaxpr(jax_tcgemm.accelerate(f))(*args))


# --- which products are one call ------------------------------------------------------------------

ARGS = normal(M, K), normal(K, N), normal(K, N, seed=1)


def gated(x, w, v):
    return jax.nn.silu(x @ w) * (x @ v)


def test_a_gate_is_one_call():
    (eqn,) = groups(gated, *ARGS)
    assert kinds([eqn]) == ["two"]
    assert names(eqn.params["function"]) == ["logistic", "mul", "mul"]
    check(gated, *ARGS)


def test_products_of_what_comes_between_are_two_calls():
    """The second product needs the first: one call would have to be before and after itself."""

    def f(x, w, v):
        gate = x @ w
        return jax.nn.silu(gate) * (x @ (v + jnp.sum(gate)))

    assert kinds(groups(f, *ARGS)) == ["one", "one"]
    check(f, *ARGS)
    check_every_product(f, *ARGS)


def test_a_use_before_the_other_factor_is_known():
    def f(x, w, v):
        gate = x @ w
        first = jnp.cumsum(gate, 0)
        up = x @ jnp.sort(v, 0)
        return first, jax.nn.silu(gate) * up

    check(f, *ARGS)
    check_every_product(f, *ARGS)
    assert "two" not in kinds(groups(f, *ARGS))


def test_a_product_that_others_need_is_one_more_result():
    def f(x, w, v):
        up = x @ v
        return jax.nn.silu(x @ w) * up, jnp.cumsum(up, -1)

    (eqn,) = groups(f, *ARGS)
    assert kinds([eqn]) == ["two"]
    assert len(eqn.outvars) == 2
    check(f, *ARGS)


def test_a_product_that_depends_on_the_other_is_not_fused_with_it():
    """Although both read one operand, and one equation reads both."""

    def f(x, y):
        first = y @ x / 4
        second = y @ first / 4
        return second - first, first

    x, y = normal(K, K), normal(K, K, seed=1)
    check(f, x, y)
    assert "two" not in kinds(groups(f, x, y))


def test_products_without_a_common_reader_are_not_fused():
    def f(x, w, v):
        return jnp.sin(x @ w), jnp.cos(x @ v)

    assert kinds(groups(f, *ARGS)) == ["one", "one"]
    x, w, _ = ARGS
    different = jnp.sin, normal(K, 2 * N)

    def shapes(x, w, v):
        return jnp.sum(jnp.sin(x @ w), 1) + jnp.cumsum(x @ v, 1)[:, 0]

    check(shapes, x, w, different[1])
    assert "two" not in kinds(groups(shapes, x, w, different[1]))


def test_three_products_of_one_operand():
    def f(x, w, v):
        return jax.nn.silu(x @ w) * (x @ v) + jnp.tanh(x @ (w - v))

    assert sorted(kinds(groups(f, *ARGS))) == ["one", "two"]
    check(f, *ARGS, tolerance=1e-4)
    check_every_product(f, *ARGS)


def rows(x, w, v):
    return jax.nn.silu(jnp.einsum("mk,kn->nm", x, w)) * jnp.einsum("mk,kn->nm", x, v)


# Functions of `rows`, whose weights are rows of the result, for which it can be transposed.
TRANSPOSED = {
    "a factor": lambda h, w: w @ h,
    "a factor, and sums": lambda h, w: (w @ h, jnp.sum(h, 0), jnp.sum(h)),
    "put together": lambda h, w: jnp.concatenate([w, w], 1) @ jnp.concatenate([h, -h]),
    "padded and cut": lambda h, w: (w @ lax.pad(h, 1.0, ((2, 4, 0), (0, 0, 0)))[1 : N + 1]).T,
}
# Functions for which it cannot, since data would move.
KEPT = {
    "a result": lambda h, w: h,
    "scanned": lambda h, w: w @ jnp.cumsum(h, 0),
    "reshaped": lambda h, w: w @ h.reshape(N, 2, M // 2)[:, 0],
    "beside another array": lambda h, w: (
        w @ (h + jnp.sin(jnp.arange(1.0, N * M + 1)).reshape(N, M))
    ),
}


@pytest.mark.parametrize("then", [*TRANSPOSED, *KEPT])
def test_gates_of_rows_are_transposed_where_no_data_moves(then):
    """Kernels compute gate and up as columns."""

    def f(x, w, v):
        return (TRANSPOSED | KEPT)[then](rows(x, w, v), w)

    found = equations(f, *ARGS)
    assert ("two" in kinds(groups(f, *ARGS))) == (then in TRANSPOSED)
    assert "transpose" not in [eqn.primitive.name for eqn in found]
    step = jax.value_and_grad(lambda *x: sum(map(jnp.sum, jax.tree.leaves(f(*x)))), (0, 1, 2))
    for g in (f, step):
        check(g, *ARGS, tolerance=1e-4)
        check_every_product(g, *ARGS)


def test_arrays_of_both_kinds_of_gates_are_transposed_once():
    """The epilogue of one reads the results of the other without a transposition."""

    def f(x, w, v):
        return w @ (rows(x, w, v) * gated(x, w, v).T)

    check(f, *ARGS, tolerance=1e-4)
    check_every_product(f, *ARGS)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_gate_over_devices(axis_type):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(ARGS, (P("x"), P(None, "y"), P(None, "y")), strict=True)
        ]
        step = jax.value_and_grad(lambda *args: jnp.sum(gated(*args) ** 2), (0, 1, 2))
        for f in (gated, step):
            # JAX reshards the numbers in a derivative, which stays JAX's own function then.
            if f is gated or axis_type == AxisType.Auto:
                assert kinds(groups(f, *args))[0] == "two"
            expected, got = (jax.jit(g)(*args) for g in (f, jax_tcgemm.accelerate(f)))
            for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gates_in_a_shard_map(check_vma):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    specs = P("x"), P(None, "y"), P(None, "y")

    def part(x, w, v):
        gate, up = jnp.split(x @ jnp.concatenate([w, v], 1), 2, -1)
        return gated(x, w, v) + jnp.tanh(gate) * up

    f = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P("x", "y"), check_vma=check_vma)
    check(f, *ARGS)
    check_every_product(f, *ARGS)
    assert "num_rhs=2" in str(jax.make_jaxpr(jax_tcgemm.accelerate(f))(*ARGS))


def test_transformations_of_gates():
    fast, (x, w, v) = jax_tcgemm.accelerate(gated), ARGS
    stacked = np.stack([x, 2 * np.asarray(x)])
    got, expected = (jax.jit(jax.vmap(f, (0, None, None)))(stacked, w, v) for f in (fast, gated))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    got, expected = (jax.jit(lambda *x, f=f: jax.jvp(f, x, x))(*ARGS) for f in (fast, gated))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)
    got, expected = (
        jax.device_get(jax.jit(jax.grad(lambda *x, f=f: jnp.sum(f(*x) ** 2), (0, 1, 2)))(*ARGS))
        for f in (fast, gated)
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * abs(b).max())


STACKED = normal(M, K), normal(K, 2 * N, seed=2), normal(2 * N, seed=3)


def swiglu(x, w, bias):
    h = x @ w + bias
    return jax.nn.silu(h[:, :N]) * h[:, N:]


def test_equations_before_the_split_are_applied_to_gate_and_up():
    def capped(x, w, bias):
        h = 5 * jnp.tanh((x @ w) / 5) + bias
        gate, up = jnp.split(h, 2, -1)
        return jax.nn.gelu(gate) * up

    for f in (swiglu, capped):
        (eqn,) = groups(f, *STACKED)
        assert kinds([eqn]) == ["stacked"]
        # The weights as they are, in another shape; and all of the bias.
        assert [x.aval.shape for x in eqn.invars] == [(M, K), (K, 2, N), (2 * N,)]
        check(f, *STACKED)
        check_every_product(f, *STACKED)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_roundings_before_the_split_stay(dtype):
    """Of sums that are exact in any order nothing but roundings is left to differ."""
    rng = np.random.default_rng()
    args = [
        jnp.asarray(rng.integers(-8, 9, shape) / 8, dtype)
        for shape in ((M, K), (K, 2 * N), (2 * N,))
    ]
    check(lambda x, w, b: swiglu(x, w, b) + 1, *args, exact=True)
    (eqn,) = groups(swiglu, *args, wide=True)
    assert eqn.params["options"].diagnostics == (RoundingsRemoved(6),)
    x, w, b = (np.asarray(y, "f8") for y in args)
    gate, up = np.split(x @ w + b, 2, -1)
    got = jax_tcgemm.accelerate(swiglu, wide=True)(*args)
    epsilon = float(jnp.finfo(dtype).eps)
    exact = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(np.asarray(got, "f8"), exact, rtol=epsilon, atol=1e-6)


TAKEN = {
    "slices": lambda h: (h[:, :N], h[:, N:]),
    "split": lambda h: jnp.split(h, 2, -1),
}
BACKWARD = {
    "no bias": lambda x, w, b: x @ w,
    "a bias": lambda x, w, b: x @ w + b,
    "what XLA does to both": lambda x, w, b: jnp.tanh(x @ w + b),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("both", BACKWARD)
@pytest.mark.parametrize("how", TAKEN)
def test_derivatives_of_gate_and_up_are_one_result(how, both, dtype):
    """The call writes both derivatives into one array; an XLA loop concatenates them itself."""

    def loss(x, w, bias, down):
        gate, up = TAKEN[how](BACKWARD[both](x, w, bias))
        return jnp.sum(jnp.sin((jax.nn.silu(gate) * up) @ down), dtype=jnp.float32)

    args = tuple(x.astype(dtype) for x in (*STACKED, normal(N, K, seed=4)))
    step = jax.value_and_grad(loss, (0, 1, 2, 3))
    check(step, *args, tolerance=1e-4 if dtype == "float32" else 2**-5)
    check_every_product(step, *args)
    assert _concatenates(step, *args) == (both == "what XLA does to both")


def test_interleaved_columns():
    """One call computes both if each column is contiguous in the weights or their transpose."""

    def interleaved(x, w, bias):
        h = 5 * jnp.tanh((x @ w.T) / 5) + bias
        return jax.nn.silu(h[:, ::2]) * h[:, 1 : 2 * N : 2]

    def dimension_of_two(x, w):
        h = jnp.einsum("bmk,bnck->bmnc", x, w)
        return jax.nn.silu(h[..., 0]) * h[..., 1]

    def inner_split(x, w):
        gate, up = jnp.split(jnp.einsum("bmk,bnck->bmnc", x, w), 2, -1)
        return jax.nn.silu(gate) * up

    x, w, bias = STACKED
    (eqn,) = groups(interleaved, x, w.T, bias)
    assert [v.aval.shape for v in eqn.invars] == [(M, K), (N, 2, K), (2 * N,)]
    batches = normal(3, M, K), normal(3, N, 2, K, seed=1)
    for f, args in ((interleaved, (x, w.T, bias)), (dimension_of_two, batches)):
        assert kinds(groups(f, *args)) == ["stacked"]
        which = tuple(range(len(args)))
        step = jax.value_and_grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), which)
        for g in (f, step):
            check(g, *args, tolerance=1e-4)
            check_every_product(g, *args)
    others = normal(3, M, K), normal(3, 2, N, K, seed=1)
    assert "stacked" not in kinds(groups(inner_split, *others))
    check(inner_split, *others)


def test_gate_and_up_of_a_batch_whose_rows_and_columns_alternate():
    def f(x, w):
        gate, up = jnp.einsum("bmpk,bnqk->bmnpq", x, w)
        return jax.nn.silu(gate) * up

    args = normal(2, 3, 4, K), normal(2, 5, 6, K, seed=1)
    check(f, *args)
    check_every_product(f, *args)


@pytest.mark.parametrize(
    "what",
    ["all of it is needed", "every other column", "unequal parts", "more columns first"],
)
def test_splits_that_are_not_gate_and_up(what):
    def f(x, w, bias):
        h = x @ w + bias
        if what == "all of it is needed":
            gate, up = jnp.split(h, 2, -1)
            return jax.nn.silu(gate) * up, jnp.cumsum(h, 0)
        if what == "every other column":
            return jax.nn.silu(h[:, ::2]) * h[:, 1::2]
        if what == "unequal parts":
            return jax.nn.silu(h[:, : N + 1]) * h[:, N - 1 :]
        h = h.reshape(M, 2, N // 2, 2)
        return jax.nn.silu(h[..., 0]) * h[..., 1]

    check(f, *STACKED)
    check_every_product(f, *STACKED)
    assert "stacked" not in kinds(groups(f, *STACKED))
    report = jax_tcgemm.explain(jax_tcgemm.accelerate(f), *STACKED)
    assert len(report) == 1


# --- what runs as one call ------------------------------------------------------------------------


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.fixture(params=["a loop that takes long", "a loop that takes no time"])
def gains(request, fake_cuda, monkeypatch):
    """An H200 whose configs the cost model knows, and whether one call takes less than the rest."""
    names = ["128x256x64_c2x1x1_co", "128x128x64_c1x2x1_pp", "64x64x64_c1x1x1_pp"]
    fake_cuda.implementations = lambda: {"wgmma": names, "cublaslt": ["heuristic0"]}
    fake_cuda.rejects["cublaslt"] = "has no functions"
    gains = request.param == "a loop that takes long"
    monkeypatch.setattr(selection, "loop_us", lambda *_, **__: 1000.0 if gains else 0.0)
    return gains


LARGE = {
    "two": (gated, (struct(4096, 1024), struct(1024, 2048), struct(1024, 2048))),
    "stacked": (
        lambda x, w, b: (lambda h: jax.nn.silu(h[:, :2048]) * h[:, 2048:])(x @ w + b),
        (struct(4096, 1024), struct(1024, 4096), struct(4096)),
    ),
    "stacked, as two arrays": (
        lambda x, w: (lambda h: jax.nn.silu(h[:, 0]) * h[:, 1])(jnp.einsum("mk,cnk->mcn", x, w)),
        (struct(4096, 1024), struct(2, 2048, 1024)),
    ),
    "stacked, interleaved": (
        lambda x, w, b: (lambda h: jax.nn.silu(h[:, ::2]) * h[:, 1::2])(x @ w.T + b),
        (struct(4096, 1024), struct(4096, 1024), struct(4096)),
    ),
    "stacked, of rows": (
        lambda x, w: (lambda h: jax.nn.silu(h[:, 0]) * h[:, 1])(jnp.einsum("mk,ckn->mcn", x, w)),
        (struct(4096, 1024), struct(2, 1024, 2048)),
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_one_call_where_that_should_gain_else_the_parts(kind, gains):
    f, args = LARGE[kind]
    assert kinds(groups(f, *args)) == [kind.partition(",")[0]]
    report = jax_tcgemm.explain(jax_tcgemm.accelerate(f), *args, platform="cuda")
    text = (
        jax.jit(jax_tcgemm.accelerate(f)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    )
    if gains:
        (call,) = report
        assert (call.implementation, call.problem.epilogue.gated) == ("wgmma", True)
        assert "apart they would take" in call.why
        assert not call.copies
        assert text.count("custom_call @tcgemm") == 1
        assert "stablehlo.dot_general" not in text
        assert "stablehlo.exponential" not in text
    else:
        # The parts it came from: XLA's products, rounded as they were, and XLA's loop.
        num_products = 2 if kind == "two" else 1
        assert [call.implementation for call in report] == ["xla"] * num_products
        for call in report:
            assert call.why.startswith("unfused: the cost model predicts")
            assert "nothing is known to run it faster than XLA's own product" in call.why
        assert "custom_call @tcgemm" not in text
        assert "stablehlo.exponential" in text
        assert text.count("stablehlo.dot_general") == num_products
        assert "f32" not in text.partition("stablehlo.dot_general")[2].partition("\n")[0]


@pytest.mark.parametrize("how", ["stacked", "stacked, as two arrays"])
def test_the_call_writes_both_derivatives_into_one_array(how, gains):
    f, args = LARGE[how]
    down = struct(2048, 1024)

    def loss(*args):
        return jnp.sum(f(*args[:-1]) @ args[-1], dtype=jnp.float32)

    step = jax_tcgemm.accelerate(jax.grad(loss, tuple(range(len(args) + 1))))
    text = jax.jit(step).trace(*args, down).lower(lowering_platforms=("cuda",)).as_text()
    whole = re.findall(r"stablehlo\.concatenate.*-> tensor<4096x\d", text)
    assert len(whole) == (not gains)
