"""`patch`: which products it takes, what it leaves alone, and that nothing is left of it."""

import asyncio
import functools
import operator
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas
from jax.extend.core.primitives import dot_general_p
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.passes.rewriting import options_of
from jax_tcgemm.products import patch
from jax_tcgemm.system.jax_internals import ragged_dot_general_p
from jax_tcgemm.tuning import measuring


def products(f, *args) -> tuple[int, int]:
    """How many products of a function are ours, and how many are JAX's."""
    text = str(jax.make_jaxpr(f)(*args))
    found = [
        re.findall(rf" {ours}(?:dot_general|ragged_dot\w*)\[", text) for ours in ("tcgemm_", "")
    ]
    return len(found[0]), len(found[1])


def assert_unpatched():
    for primitive in (dot_general_p, ragged_dot_general_p):
        assert "bind" not in vars(primitive)
    assert products(jnp.matmul, jnp.ones((2, 2)), jnp.ones((2, 2))) == (0, 1)


A, B, Q = normal(6, 5), normal(5, 7, seed=1), normal(2, 6, 4, 8, seed=2)
SIZES = jnp.array([2, 4])

CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())

# Name: function, operands, the same in float64, products.
ENTRIES = {
    "matmul": (jnp.matmul, (A, B), np.matmul, 1),
    "operator": (operator.matmul, (A, B), np.matmul, 1),
    "reflected operator": (lambda b: np.ones((3, 5), np.float32) @ b, (B,), lambda b: b.sum(0), 1),
    "dot": (jnp.dot, (A, B), np.dot, 1),
    "method dot": (lambda a, b: a.dot(b), (A, B), np.dot, 1),
    "vdot": (jnp.vdot, (A, A), np.vdot, 1),
    "inner": (jnp.inner, (A, A), np.inner, 1),
    "tensordot": (lambda q: jnp.tensordot(q, q, 2), (Q[0, 0],), lambda q: np.tensordot(q, q, 2), 1),
    "einsum": (
        functools.partial(jnp.einsum, "bqhd,bkhd->bhqk"),
        (Q, Q),
        functools.partial(np.einsum, "bqhd,bkhd->bhqk"),
        1,
    ),
    "multi_dot": (
        lambda a, b: jnp.linalg.multi_dot([a, b, b.T]),
        (A, B),
        lambda a, b: a @ b @ b.T,
        2,
    ),
    "lax.dot": (lax.dot, (A, B), np.dot, 1),
    "lax.batch_matmul": (lax.batch_matmul, (Q, Q.mT), np.matmul, 1),
    "lax.dot_general": (
        lambda a, b: lax.dot_general(a, b, (((0,), (1,)), ((), ()))),
        (A, A.T),
        lambda a, b: a.T @ b.T,
        1,
    ),
    "lax.ragged_dot": (
        lambda x, w: lax.ragged_dot(x, w, SIZES),
        (Q[0, :, 0], Q[1, :2].mT),
        lambda x, w: np.concatenate([x[:2] @ w[0], x[2:] @ w[1]]),
        1,
    ),
    "lax.ragged_dot_general": (
        lambda x, y: lax.ragged_dot_general(x, y, SIZES, CONTRACTED),
        (A, A),
        lambda x, y: np.stack([x[:2].T @ y[:2], x[2:].T @ y[2:]]),
        1,
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_points(name):
    f, operands, reference, num_products = ENTRIES[name]
    expected = np.broadcast_to(
        reference(*(np.asarray(x, np.float64) for x in operands)),
        jax.eval_shape(f, *operands).shape,
    )
    assert products(f, *operands) == (0, num_products)
    with jax_tcgemm.patch(implementation="host"):
        assert products(f, *operands) == (num_products, 0)
        # float32 sums of at most 48 terms of order 1.
        for run in (f, jax.jit(f)):
            np.testing.assert_allclose(run(*operands), expected, rtol=1e-5, atol=3e-5)
    assert products(f, *operands) == (0, num_products)
    assert_unpatched()


def test_the_custom_call_is_in_the_program(fake_cuda):
    f = jax.jit(jax.nn.dot_product_attention)
    with jax_tcgemm.patch():
        text = f.trace(Q, Q, Q).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @tcgemm_gemm") == 2
    assert "stablehlo.dot_general" not in text


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_einsums(data):
    sizes = {letter: data.draw(st.integers(1, 4)) for letter in "bijk"}
    lhs, rhs = (
        "".join(data.draw(st.permutations("b" + free + "k"))[: data.draw(st.integers(1, 3))])
        for free in "ij"
    )
    shared = sorted(set(lhs + rhs))
    out = "".join(data.draw(st.permutations(shared))[: data.draw(st.integers(0, len(shared)))])
    spec = f"{lhs},{rhs}->{out}"
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    operands = [rng.standard_normal([sizes[c] for c in term]) for term in (lhs, rhs)]
    singles = [jnp.asarray(x, jnp.float32) for x in operands]
    with jax_tcgemm.patch():
        assert products(functools.partial(jnp.einsum, spec), *singles)[1] == 0
        got = jnp.einsum(spec, *singles)
    np.testing.assert_allclose(got, np.einsum(spec, *operands), rtol=1e-4, atol=1e-4)


@jax.custom_vjp
def doubled(x, w):
    return x @ w


doubled.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda saved, g: (2 * g @ saved[1].T, 2 * saved[0].T @ g),
)


@jax.custom_jvp
def halved(x, w):
    return x @ w


@halved.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, 0.5 * (dx @ w + x @ dw)


X, W = normal(5, 5, seed=3), normal(5, 5, seed=4)

# Each is one function object, used outside, inside and outside again: a trace that JAX kept from
# one place must not turn up in the other.
KEPT = {
    "jit": jax.jit(lambda x, w: x @ w),
    "jit in jit": jax.jit(lambda x, w: jax.jit(jnp.matmul)(x, w) + 1),
    "vmap of jit": jax.vmap(jax.jit(lambda x, w: x @ w), (None, 0)),
    "grad of jit": jax.grad(lambda x, w: jnp.sum(jax.jit(jnp.matmul)(x, w))),
    "jvp": lambda x, w: jax.jvp(KEPT["jit"], (x, w), (w, x))[1],
    "linearize": lambda x, w: jax.linearize(KEPT["jit"], x, w)[1](w, x),
    "scan": lambda x, w: lax.scan(scanned, x, jnp.stack([w, w]))[0],
    "while": lambda x, w: lax.fori_loop(0, 2, looped, (x, w))[0],
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, taken, jnp.add, x, w),
    "map": lambda x, w: lax.map(mapped, jnp.stack([x, w])),
    "custom_vjp": jax.grad(lambda x, w: jnp.sum(doubled(x, w))),
    "custom_jvp": jax.grad(lambda x, w: jnp.sum(halved(x, w))),
    "remat": jax.grad(jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(x @ w)))),
    "ragged_dot": jax.grad(lambda x, w: jnp.sum(lax.ragged_dot(x, jnp.stack([w, w]), SIZES))),
    "hessian": jax.jit(jax.hessian(lambda x, w: jnp.sum(jnp.sin(x @ w)))),
}


def scanned(x, w):
    return jnp.tanh(x @ w), None


def looped(_, carry):
    x, w = carry
    return x @ w, w


def taken(x, w):
    return x @ w


def mapped(x):
    return x @ x


@pytest.mark.parametrize("name", KEPT)
def test_no_trace_is_reused_across_the_boundary(name):
    f = KEPT[name]
    w = jnp.stack([W, W]) if name == "vmap of jit" else W
    expected = f(X, w)
    ours, theirs = products(f, X, w)
    assert ours == 0
    assert theirs > 0
    for _ in range(2):
        with jax_tcgemm.patch(implementation="host"):
            got = f(X, w)
            inside = products(f, X, w)
            assert inside[0] > 0
            assert inside[1] == 0
        # Sums of five terms, and of a few of those.
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        assert products(f, X, w) == (0, theirs)


def test_what_is_compiled_follows_the_block():
    f = jax.jit(lambda x, w: x @ w)

    def custom_calls():
        return f.lower(X, W).as_text().count("tcgemm_gemm")

    f(X, W)
    assert custom_calls() == 0
    with jax_tcgemm.patch(implementation="host"):
        f(X, W)
        assert custom_calls() == 1
    assert custom_calls() == 0
    assert f._cache_size() == 2


def test_a_decorated_function_is_ours_wherever_it_is_traced():
    @jax_tcgemm.patch(implementation="host")
    def model(x, w):
        return jnp.sum(jnp.tanh(x @ w))

    step = jax.jit(jax.grad(model))
    assert products(step, X, W) == (2, 0)
    assert products(lambda x, w: model(x, w) + jnp.sum(x @ w), X, W) == (1, 1)
    np.testing.assert_allclose(step(X, W), jax.grad(model.__wrapped__)(X, W), rtol=1e-5, atol=1e-5)
    assert_unpatched()


def implementation_here():
    """What a product that is traced now is forced to run by."""
    (eqn,) = jax.make_jaxpr(lambda x, w: x @ w)(X, W).eqns
    options = options_of(eqn)
    return options.implementation if options else "JAX's"


def test_nested_blocks_and_exceptions():
    implementation = implementation_here

    with jax_tcgemm.patch():
        assert implementation() is None
        with jax_tcgemm.patch(implementation="host"):
            assert implementation() == "host"
            with jax_tcgemm.patch(implementation="xla"):
                assert implementation() == "xla"
            with pytest.raises(RuntimeError, match="on purpose"), jax_tcgemm.patch():
                raise RuntimeError("on purpose")
            assert implementation() == "host"
        assert implementation() is None
    assert implementation() == "JAX's"
    assert_unpatched()


def test_blocks_may_be_left_in_any_order():
    """Generators and coroutines that wait in a block hold it open, and leave nothing behind."""

    def block(implementation):
        with jax_tcgemm.patch(implementation=implementation):
            yield

    now = implementation_here

    blocks = {name: block(name) for name in ("host", "xla", None)}
    for name, generator in blocks.items():
        next(generator)
        assert now() == name
    for name, left in (("host", None), (None, "xla"), ("xla", "JAX's")):
        blocks[name].close()
        assert now() == left
    assert_unpatched()

    async def in_a_block(name):
        with jax_tcgemm.patch(implementation=name):
            for _ in range(3):
                await asyncio.sleep(0)

    async def at_once():
        await asyncio.gather(*map(in_a_block, ("host", "xla")))

    asyncio.run(at_once())
    assert now() == "JAX's"
    assert_unpatched()


def test_threads_do_not_affect_each_other():
    """Two threads trace one function in turns, one inside and one outside, in every order."""
    f = jax.jit(lambda x, w: jnp.einsum("ij,jk->ik", x, w) @ w)
    barrier = threading.Barrier(3, timeout=60)
    found = {"inside": [], "outside": [], "late": []}

    def count(name):
        for _ in range(5):
            barrier.wait()
            found[name].append(products(f, X, W))

    def inside():
        with jax_tcgemm.patch():
            count("inside")

    def late():
        count("late")
        with jax_tcgemm.patch():
            found["late"].append(products(f, X, W))

    threads = [threading.Thread(target=t) for t in (inside, late, lambda: count("outside"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {
        "inside": [(2, 0)] * 5,
        "outside": [(0, 2)] * 5,
        "late": [(0, 2)] * 5 + [(2, 0)],
    }
    assert_unpatched()


def test_a_thread_started_inside_is_not_affected():
    found = []
    with jax_tcgemm.patch():
        thread = threading.Thread(target=lambda: found.append(products(jnp.matmul, X, W)))
        thread.start()
        thread.join()
        assert products(jnp.matmul, X, W) == (1, 0)
    assert found == [(0, 1)]


def _in_pallas(x, w):
    def kernel(x, w, out):
        out[...] = KEPT["jit"](x[...], w[...])

    return pallas.pallas_call(kernel, jax.ShapeDtypeStruct((5, 5), x.dtype), interpret=True)(x, w)


@pytest.mark.parametrize(
    ("transformed", "expected", "num_kernels"),
    [
        (_in_pallas, lambda x, w: x @ w, 1),
        (lambda x, w: jax.jvp(_in_pallas, (x, w), (w, x))[1], lambda x, w: w @ w + x @ x, 3),
        (lambda x, w: jax.vmap(_in_pallas)(x[None], w[None])[0], lambda x, w: x @ w, 1),
    ],
    ids=["itself", "its tangent", "batched"],
)
def test_pallas_kernels_are_left_alone(transformed, expected, num_kernels):
    """Also what they call that is ours outside of them."""

    def f(x, w):
        return KEPT["jit"](x, w) + transformed(x, w) @ w

    with jax_tcgemm.patch():
        assert products(f, X, W) == (2, num_kernels)
        got = jax.jit(f)(X, W)
    np.testing.assert_allclose(got, X @ W + expected(X, W) @ W, rtol=1e-4, atol=1e-4)


def test_pallas_operations_are_ours_outside_of_their_kernels():
    """What has "pallas" in its module's name and is no kernel."""
    code = "import jax\ndef f(x, w): return jax.lax.dot(x, w)"
    for name, ours in [
        ("jax.experimental.pallas.ops.gpu.attention", 1),
        ("my.pallas.model", 1),
        ("jax._src.pallas.pallas_call", 0),
        ("jax.somewhere.else.pallas.core", 0),
    ]:
        scope = {"__name__": name}
        exec(code, scope)
        with jax_tcgemm.patch():
            assert products(scope["f"], X, W) == (ours, 1 - ours)


def test_it_lasts_as_long_as_the_process(run_python, tmp_path):
    """Entered before the program begins and never left, with nothing said at its end."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import jax_tcgemm; jax_tcgemm.patch().__enter__()")
    code = """
import gc, os
os.dup2(1, 2)
import jax, jax.numpy as jnp
gc.collect()
f = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(x @ x))))
x = jnp.ones((4, 4))
print(str(jax.make_jaxpr(f)(x)).count("tcgemm_dot_general["), float(f(x)[0, 0]))
"""
    num_products, value = run_python(code, first=folder, JAX_PLATFORMS="cpu").split()
    assert num_products == "3"
    np.testing.assert_allclose(float(value), 8 * np.cos(4), rtol=1e-5)


class _Fixed:
    """A primitive that cannot be changed."""

    __slots__ = ()


def test_primitives_that_cannot_be_replaced_are_left_alone(monkeypatch):
    monkeypatch.setattr(patch, "_ROUTES", {_Fixed(): jax_tcgemm.dot_general})
    block = jax_tcgemm.patch()
    with pytest.warns(RuntimeWarning, match="products stay its own"):
        block.__enter__()
    assert products(lax.dot, X, W) == (0, 1)
    np.testing.assert_allclose(lax.dot(X, W), np.matmul(X, W), rtol=1e-5)
    block.__exit__(None, None, None)


def test_products_with_parameters_that_ours_do_not_know_are_left_alone(monkeypatch):
    monkeypatch.setattr(patch, "_parameters", lambda ours: {"dimension_numbers"})
    with jax_tcgemm.patch():
        assert products(lax.dot, X, W) == (0, 1)


def test_what_no_implementation_covers_runs_on_xla_and_is_reported():
    x = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    with jax_tcgemm.patch():
        np.testing.assert_array_equal(jax.jit(jnp.matmul)(x, x.T), np.matmul(x, x.T))
        ragged = jax.jit(lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 2])))
        np.testing.assert_array_equal(ragged(x, jnp.stack([x.T, x.T])), np.matmul(x, x.T))
        (call,) = jax_tcgemm.explain(jnp.matmul, x, x.T)
    assert call.implementation == "xla"
    assert "int32" in call.why


def test_what_cannot_be_taken_is_refused_by_name():
    huge = jax.ShapeDtypeStruct((1, 2**31), jnp.bfloat16)
    column = jax.ShapeDtypeStruct((2**31, 1), jnp.bfloat16)
    with jax_tcgemm.patch(), pytest.raises(ValueError, match=r"at most 2\*\*31 - 1, got lhs"):
        jax.eval_shape(jnp.matmul, huge, column)
    x = jnp.ones((4, 4), jnp.int32)
    with (
        jax_tcgemm.patch(implementation="host"),
        pytest.raises(ValueError, match="host cannot run this"),
    ):
        jnp.matmul(x, x)
    assert_unpatched()


@pytest.mark.parametrize(
    ("implementation", "error", "message"),
    [
        ("nosuch", ValueError, "patch: implementation must be one of .*, got implementation='no"),
        (3, TypeError, "patch: implementation must be a string or None, got implementation=3"),
    ],
)
def test_bad_arguments(implementation, error, message):
    with pytest.raises(error, match=message), jax_tcgemm.patch(implementation=implementation):
        pass
    assert_unpatched()


def test_xla_is_measured_as_itself():
    (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, X, W, platform="cpu")
    with jax_tcgemm.patch(), selection.collect() as ours:
        (measured,) = measuring.measure(call.problem, [("xla", "default")], 2)
    assert measured.name == "xla/default"
    assert not ours


def test_programs_for_several_devices(run_python):
    code = """
import jax, jax.numpy as jnp, numpy as np, jax_tcgemm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

a, b = (jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2))
gradient = jax.grad(lambda a, b: jnp.sum(jnp.sin(a @ b)), (0, 1))
expected = gradient(a, b)
for axis_type in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh), jax_tcgemm.patch():
        x = jax.device_put(a, NamedSharding(mesh, P("x", None)))
        y = jax.device_put(b, NamedSharding(mesh, P(None, "y")))
        assert str(jax.make_jaxpr(gradient)(x, y)).count("tcgemm_dot_general[") == 3
        for got, exact in zip(jax.jit(gradient)(x, y), expected):
            np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)
        f = jax.shard_map(
            jnp.matmul, mesh=mesh, in_specs=(P("x", None), P(None, "y")), out_specs=P("x", "y")
        )
        compiled = jax.jit(f).lower(x, y).compile()
        assert "tcgemm_gemm" in compiled.as_text()
        np.testing.assert_allclose(compiled(x, y), a @ b, rtol=1e-4, atol=1e-4)
    # lax.ragged_dot must be told how its result is divided.
    if axis_type == AxisType.Explicit:
        with jax.set_mesh(mesh), jax_tcgemm.patch():
            sizes = jnp.array([5, 0, 9])
            ragged = jax.jit(lambda x, w: jax.lax.ragged_dot(x, w, sizes, out_sharding=P("x")))
            w = jax.device_put(jnp.stack([b, 2 * b, 3 * b]), NamedSharding(mesh, P(None, "y")))
            got = ragged(x, w)
            assert jax.typeof(got).sharding.spec == P("x", None)
        exact = np.concatenate([a[:5] @ b, a[5:14] @ (3 * b), np.zeros((2, 16))])
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)
print("done")
"""
    flags = "--xla_force_host_platform_device_count=4"
    assert run_python(code, XLA_FLAGS=flags, TCGEMM_IMPLEMENTATION="host") == "done\n"
