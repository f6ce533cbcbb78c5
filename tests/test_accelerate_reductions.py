"""`accelerate`: reductions of what follows a product as results of its call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import check, check_every_product, groups, kinds, names
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import selection

# A program that is not rewritten is a warning.
pytestmark = pytest.mark.filterwarnings("error:accelerate:RuntimeWarning")

M, K, N = 12, 8, 16


def shapes(eqn):
    return [x.aval.shape for x in eqn.outvars]


def net(params, x):
    w, b, v, c = params
    return jax.nn.gelu(x @ w + b) @ v + c


def loss(params, x, y):
    return jnp.mean((net(params, x) - y) ** 2)


def net_arguments(dtype="float32"):
    params = normal(K, N), normal(N), normal(N, K) / 4, normal(K, seed=1)
    return [x.astype(dtype) for x in params], normal(M, K, seed=2, dtype=dtype), normal(M, K)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_biases_and_the_loss(dtype):
    """Each is a result of the call that gives what it is a sum of."""
    args = net_arguments(dtype)
    step = jax.value_and_grad(loss)
    check(step, *args, tolerance=1e-5 if dtype == "float32" else 2**-6)
    check_every_product(step, *args)
    hidden, last, backward = groups(step, *args)
    assert shapes(hidden) == [(M, N), (M, N)]
    assert shapes(last) == [(M, K), (), (K,)]
    assert shapes(backward) == [(M, N), (N,)]
    assert "reduce_sum" in names(backward.params["function"])


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, jnp.min], ids=lambda f: f.__name__)
@pytest.mark.parametrize("axis", [0, 1, None])
def test_reductions_of_rows_and_columns(reduce, axis):
    def f(x, w, v):
        h = jnp.sin(x @ w)
        return h @ v, reduce(abs(h), axis=axis)

    args = normal(M, K), normal(K, N), normal(N, 4)
    (eqn,) = groups(f, *args)
    assert shapes(eqn) == [(M, N), jnp.zeros((M, N)).sum(axis).shape]
    check(f, *args)
    check_every_product(f, *args)


def test_reductions_of_a_gate():
    def f(x, w, v, u):
        h = jax.nn.silu(x @ w) * (x @ v)
        return h @ u, jnp.max(abs(h), -1)

    args = normal(M, K), normal(K, N), normal(K, N, seed=1), normal(N, 4)
    (eqn,) = groups(f, *args)
    assert (kinds([eqn]), shapes(eqn)) == (["two"], [(M, N), (M,)])
    check(f, *args)


def test_what_xla_reduces_on_its_way_stays():
    """A loop that reads the values anyway may reduce them, too: as norms and softmax do."""

    def norm(x, w, y):
        z = y + x @ w
        return z / jnp.sqrt(jnp.mean(z**2, -1, keepdims=True))

    def softmax(x, w, y):
        return jax.nn.softmax(jnp.sin(x @ w) + y)

    def parts(x, w, y):
        z = jnp.tanh(x @ w + y)
        return z @ w.T, z.reshape(3, 4, N).sum(1)

    args = normal(M, K), normal(K, N), normal(M, N)
    for f in (norm, softmax, parts):
        check(f, *args)
        check_every_product(f, *args)
        for eqn in groups(f, *args):
            assert not [x for x in names(eqn.params["function"]) if x.startswith("reduce")]


def test_integers_and_products_of_numbers_stay():
    def f(x, w):
        z = x @ w
        return jnp.cumsum(z > 0, 0), jnp.prod(jnp.sin(z), 0), jnp.sum(z > 0, 0)

    args = normal(M, K), normal(K, N)
    check(f, *args)
    for eqn in groups(f, *args):
        assert not [x for x in names(eqn.params["function"]) if x.startswith("reduce")]


def test_reductions_are_part_of_a_kernel(fake_cuda, monkeypatch):
    configs = ["128x256x64_c2x1x1_co", "64x64x64_c1x1x1_pp"]
    fake_cuda.implementations = lambda: {"wgmma": configs, "cublaslt": ["heuristic0"]}
    fake_cuda.rejects["cublaslt"] = "has no functions"
    monkeypatch.setattr(selection, "loop_us", lambda *_, **__: 1000.0)
    struct = jax.ShapeDtypeStruct
    params = [struct(s, jnp.bfloat16) for s in ((256, 1024), (1024,), (1024, 256), (256,))]
    args = params, struct((512, 256), jnp.bfloat16), struct((512, 256), jnp.bfloat16)
    step = jax_tcgemm.accelerate(jax.grad(loss))
    report = jax_tcgemm.explain(step, *args, platform="cuda")
    fused = [call for call in report if call.implementation == "wgmma"]
    forms = [[x.over for x in call.problem.epilogue.function.results] for call in fused]
    assert forms == [["", ""], ["", "columns", "rows"], ["", "rows"]]


@pytest.mark.parametrize("specs", [(P("x"), P()), (P("x", "y"), P("y"))], ids=str)
def test_divided_over_devices(specs):
    """Each device computes its elements; only what is left, the sums, is XLA's."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    data, _ = (NamedSharding(mesh, spec) for spec in specs)
    params, x, y = net_arguments()
    args = params, jax.device_put(x, data), jax.device_put(y, data)
    step = jax.value_and_grad(loss)
    accelerated = jax.jit(jax_tcgemm.accelerate(step))
    text = accelerated.lower(*args).as_text()
    # What is done to elements is inside of calls that are divided, reductions are not.
    assert "stablehlo.tanh" not in text
    assert "stablehlo.reduce" in text
    expected, got = jax.jit(step)(*args), accelerated(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


@pytest.mark.parametrize("gains", ["all of it", "the rest", "nothing"])
def test_a_reduction_that_costs_too_much_is_left_out(gains, fake_cuda, monkeypatch):
    """The call is what it would be without it, and so are explanations."""
    fake_cuda.implementations = lambda: {"wgmma": ["128x256x64_c2x1x1_co"]}
    monkeypatch.setattr(selection, "loop_us", lambda *_, **__: 0.0 if gains == "nothing" else 200.0)
    predicted = selection.predicted_us

    def costly(problem, device):
        function = problem.epilogue.function
        reduces = function is not None and any(x.over for x in function.results)
        return predicted(problem, device) + 1000.0 * (reduces and gains != "all of it")

    monkeypatch.setattr(selection, "predicted_us", costly)

    def backward(g, w, z):
        dz = (g @ w.T) * jax.nn.sigmoid(z)
        return dz @ w, jnp.sum(dz, 0)

    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 512), (4096, 512), (4096, 4096))]
    accelerated = jax_tcgemm.accelerate(backward)
    assert shapes(groups(backward, *args)[0]) == [(4096, 4096), (4096,)]
    call, _ = jax_tcgemm.explain(accelerated, *args, platform="cuda")
    text = jax.jit(accelerated).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert (call.implementation == "wgmma") == (gains != "nothing")
    assert ("stablehlo.exponential" in text) == (gains == "nothing")
    # What the kernel gives of eight rows each, or all that it has stored.
    reduced = "512x4096xf32" if gains == "all of it" else "4096x4096xf32"
    assert f"across dimensions = [0] : (tensor<{reduced}>" in text
    if gains != "nothing":
        reduced = [x.over for x in call.problem.epilogue.function.results]
        assert reduced == (["", "rows"] if gains == "all of it" else [""])
