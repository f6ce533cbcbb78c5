"""Products divided over eight CPU devices: values, and collectives beside those of XLA's dot."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm

SIZES, AXES = (2, 2, 2), ("x", "y", "z")
NN = (((1,), (0,)), ((), ()))
host = functools.partial(jax_tcgemm.dot_general, implementation="host")
MESHES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)


def mesh_of(axis_type, sizes=SIZES, axes=AXES):
    devices = jax.devices("cpu")[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, axes, axis_types=(axis_type,) * len(axes), devices=devices)


def normal(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def compiled(f, *args):
    """The compiled program's text, and how often it holds each collective."""
    text = jax.jit(f).lower(*args).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" ({kinds})(?:-start)?\(", text)
    return text, dict(collections.Counter(found))


def is_ours(text):
    """Whether every product in a program's text is ours."""
    return 'custom_call_target="tcgemm_gemm"' in text and not re.search(r" dot\(", text)


def assert_close(got, expected, terms=64):
    """float32 sums of `terms` products of standard normals, in any order."""
    atol = 4 * np.finfo(np.float32).eps * terms
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-5, atol=atol), got, expected)


# Shardings of lhs (m, k), rhs (k, n) and, where it is asked for, the result (m, n), and the
# collectives of the product.
CASES = {
    "m": (P("x"), P(), None, {}),
    "n": (P(), P(None, "x"), None, {}),
    "m, n": (P("x"), P(None, "y"), None, {}),
    "m over two": (P(("x", "y")), P(None, "z"), None, {}),
    "k": (P(None, "x"), P("x"), P(), {"all-reduce": 1}),
    "k over two": (P(None, ("x", "y")), P(("x", "y")), P(), {"all-reduce": 1}),
    "k, result m": (P(None, "x"), P("x"), P("x"), {"reduce-scatter": 1}),
    "k, result n": (P(None, "x"), P("x"), P(None, "x"), {"reduce-scatter": 1}),
    "k over two, result m, n": (
        P(None, ("x", "y")),
        P(("x", "y")),
        P("x", "y"),
        {"reduce-scatter": 2},
    ),
    "m, n, k": (P("y", "x"), P("x", "z"), P("y", "z"), {"all-reduce": 1}),
    "m and k of rhs on one axis": (P("x"), P("x"), P("x"), {"all-gather": 1}),
    "m and n on one axis": (P("x"), P(None, "x"), P("x"), {"all-gather": 1}),
    "k of lhs and n on one axis": (P(None, "x"), P(None, "x"), P(None, "x"), {"all-gather": 1}),
    "both on both": (P("x", "y"), P("x", "y"), P("x", "y"), {"all-gather": 2}),
    "k of lhs": (P(None, "x"), P(), P(), {"all-reduce": 1}),
    "result": (P(), P(), P("x", "y"), {}),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    return request.param


def sharded_call(dot_general, mesh, out):
    """A product whose result is sharded as `out` says, in the way of the mesh."""
    if mesh.are_all_axes_explicit:
        return lambda a, b: dot_general(a, b, NN, out_sharding=out)
    if out is None:
        return lambda a, b: dot_general(a, b, NN)
    sharding = NamedSharding(mesh, out)
    return lambda a, b: lax.with_sharding_constraint(dot_general(a, b, NN), sharding)


@MESHES
def test_values_and_collectives(case, axis_type):
    lhs, rhs, out, expected = case
    mesh = mesh_of(axis_type)
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    with jax.set_mesh(mesh):
        x, y = (jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((a, lhs), (b, rhs)))
        ours, theirs = (sharded_call(f, mesh, out) for f in (host, lax.dot_general))
        text, ours_moves = compiled(ours, x, y)
        _, theirs_move = compiled(theirs, x, y)
        got = jax.jit(ours)(x, y)
        assert got.sharding == jax.jit(theirs)(x, y).sharding
    assert_close(got, a.astype(np.float64) @ b)
    assert is_ours(text)
    assert ours_moves == expected
    assert sum(ours_moves.values()) <= sum(theirs_move.values())


@MESHES
def test_gradients(case, axis_type):
    lhs, rhs, out, _ = case
    mesh = mesh_of(axis_type)
    a, b = normal(16, 24, seed=2), normal(24, 32, seed=3)

    def grads(f):
        return jax.jit(jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b))), (0, 1)))

    with jax.set_mesh(mesh):
        x, y = (jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((a, lhs), (b, rhs)))
        ours = grads(sharded_call(host, mesh, out))
        assert is_ours(compiled(ours, x, y)[0])
        got = ours(x, y)
        expected = grads(sharded_call(lax.dot_general, mesh, out))(x, y)
        if axis_type == AxisType.Explicit:
            assert [g.sharding for g in got] == [e.sharding for e in expected]
    g = np.cos(a.astype(np.float64) @ b)
    assert_close(got, (g @ b.T, a.T @ g))


HEADS = (((3,), (3,)), ((0, 2), (0, 2)))  # einsum bqhd,bkhd->bhqk


@MESHES
@pytest.mark.parametrize(
    ("numbers", "shapes", "specs", "collectives"),
    [
        (HEADS, [(4, 6, 8, 16)] * 2, [P("x", None, "y"), P("x", None, "y"), P("x", "y")], {}),
        (HEADS, [(4, 6, 8, 16)] * 2, [P(None, None, None, "x")] * 2 + [P()], {"all-reduce": 1}),
        (
            (((0, 2), (1, 0)), ((), ())),
            [(8, 6, 4), (4, 8, 10)],
            [P("x", "z", "y"), P("y", "x"), P("z")],
            {"all-reduce": 1},
        ),
        (
            (((0,), (0,)), ((), ())),
            [(8,), (8, 6)],
            [P("x"), P("x", "y"), P("y")],
            {"all-reduce": 1},
        ),
        ((((0,), (0,)), ((), ())), [(8,), (8,)], [P("x"), P("x"), P()], {"all-reduce": 1}),
        (
            (((), ()), ((0,), (0,))),
            [(8, 4), (8, 6)],
            [P("x", "y"), P("x", "z"), P("x", "y", "z")],
            {},
        ),
    ],
    ids=["heads", "head size", "two contracted", "vector", "scalar", "outer"],
)
def test_dimension_numbers(numbers, shapes, specs, collectives, axis_type):
    mesh = mesh_of(axis_type)
    values = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    *operand_specs, out = specs
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(v, NamedSharding(mesh, spec))
            for v, spec in zip(values, operand_specs, strict=True)
        ]
        out_sharding = out if axis_type == AxisType.Explicit else None
        f = functools.partial(host, dimension_numbers=numbers, out_sharding=out_sharding)
        text, found = compiled(f, *args)
        got = jax.jit(f)(*args)
    with jax.enable_x64(True):
        expected = lax.dot_general(*(v.astype(np.float64) for v in values), numbers)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, out), got.ndim)
    assert_close(got, expected)
    assert is_ours(text)
    assert found == collectives


@pytest.mark.parametrize(
    ("sizes", "axes"), [((6,), ("x",)), ((2, 3), ("x", "y")), ((3, 2), ("x", "y"))], ids=str
)
def test_a_mesh_of_six(sizes, axes):
    mesh = mesh_of(AxisType.Auto, sizes, axes)
    a, b = normal(12, 18, seed=0), normal(18, 24, seed=1)
    x = jax.device_put(a, NamedSharding(mesh, P(axes[1:], axes[0])))
    y = jax.device_put(b, NamedSharding(mesh, P(axes[0], axes[1:])))
    f = functools.partial(host, dimension_numbers=NN)
    assert is_ours(compiled(f, x, y)[0])
    assert_close(jax.jit(f)(x, y), a.astype(np.float64) @ b)


def test_a_mesh_that_no_type_tells():
    """Shardings given to jit alone: enough where any mesh is made of axes of two devices."""
    f = functools.partial(host, dimension_numbers=NN)
    a, b = normal(12, 24, seed=0), normal(24, 36, seed=1)
    mesh = mesh_of(AxisType.Auto, (2, 4), ("x", "y"))
    shardings = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P("y", "x"))
    g = jax.jit(f, in_shardings=shardings)
    assert is_ours(g.lower(a, b).compile().as_text())
    assert_close(g(a, b), a.astype(np.float64) @ b)

    mesh = mesh_of(AxisType.Auto, (2, 3), ("x", "y"))
    shardings = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P("y", "x"))
    with pytest.raises(ValueError, match="how its mesh arranges 6 devices is not known"):
        jax.jit(f, in_shardings=shardings)(a, b)
    g = functools.partial(jax_tcgemm.dot_general, dimension_numbers=NN)
    g = jax.jit(g, in_shardings=shardings)
    assert_close(g(a, b), a.astype(np.float64) @ b)


def test_out_sharding_of_matmul(monkeypatch):
    """As of jnp.matmul, of a batch of rows times columns."""
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", "host")  # the choice, whatever the processor
    mesh = mesh_of(AxisType.Explicit)
    a, b = normal(4, 16, 24, seed=0), normal(24, 32, seed=1)
    with jax.set_mesh(mesh):
        x, y = (
            jax.device_put(v, NamedSharding(mesh, s))
            for v, s in ((a, P(None, "y", "x")), (b, P("x", "z")))
        )
        out = P("x", "y", None)
        text, found = compiled(lambda x, y: jax_tcgemm.matmul(x, y, out_sharding=out), x, y)
        got = jax.jit(jax_tcgemm.matmul, static_argnames="out_sharding")(x, y, out_sharding=out)
        assert jax.typeof(got).sharding.spec == out
    assert is_ours(text)
    assert found["reduce-scatter"] == 1
    assert_close(got, a.astype(np.float64) @ b)


@pytest.mark.parametrize("rows", [13, 1])
@pytest.mark.parametrize("inner", [21, 5, 1])
def test_uneven_extents(rows, inner):
    """Slices of sharded arrays keep being sharded, with padding on the last devices."""
    mesh = mesh_of(AxisType.Auto, (2, 4), ("x", "y"))
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    # What is sliced off must not get into the sum, whatever it is.
    a[:, inner:], b[inner:] = np.nan, np.nan

    def f(product, a, b):
        a = lax.with_sharding_constraint(a, NamedSharding(mesh, P("x", "y")))[:rows, :inner]
        b = lax.with_sharding_constraint(b, NamedSharding(mesh, P("y")))[:inner]
        return product(a, b, NN)

    expected = a[:rows, :inner].astype(np.float64) @ b[:inner]
    ours, theirs = functools.partial(f, host), functools.partial(f, lax.dot_general)
    assert_close(jax.jit(ours)(a, b), expected)
    (text, ours_moves), (_, theirs_move) = compiled(ours, a, b), compiled(theirs, a, b)
    assert is_ours(text)
    assert sum(ours_moves.values()) <= sum(theirs_move.values())


def test_part_of_an_axis():
    """Eight devices over 32 columns that become 4 heads: each head is divided over two of them."""
    mesh = mesh_of(AxisType.Auto, (8,), ("x",))
    h, w = normal(6, 32, seed=0), normal(4, 8, 5, seed=1)

    def f(product, h, w):
        heads = h.reshape(6, 4, 8)
        return product(heads, w, (((2,), (1,)), ((1,), (0,))))

    x = jax.device_put(h, NamedSharding(mesh, P(None, "x")))
    text, ours_moves = compiled(functools.partial(f, host), x, w)
    _, theirs_move = compiled(functools.partial(f, lax.dot_general), x, w)
    assert is_ours(text)
    assert sum(ours_moves.values()) <= sum(theirs_move.values())
    expected = np.einsum("qhd,hdn->hqn", h.reshape(6, 4, 8).astype(np.float64), w)
    assert_close(jax.jit(functools.partial(f, host))(x, w), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float64", "complex64"], ids=str)
@MESHES
def test_dtypes(dtype, axis_type):
    """Each device's product is rounded to the result's dtype before the sum, as XLA's dot does."""
    mesh = mesh_of(axis_type)
    with jax.enable_x64(True):
        a = jnp.asarray(3 * normal(16, 24, seed=0)).astype(dtype)
        b = jnp.asarray(3 * normal(24, 32, seed=1)).astype(dtype)
        f = functools.partial(jax_tcgemm.dot_general, dimension_numbers=NN, implementation="host")
        out = P() if axis_type == AxisType.Explicit else None
        with jax.set_mesh(mesh):
            x = jax.device_put(a, NamedSharding(mesh, P(None, "x")))
            y = jax.device_put(b, NamedSharding(mesh, P("x")))
            got = jax.jit(functools.partial(f, out_sharding=out))(x, y)
        assert got.dtype == dtype
        if dtype == "int8":
            whole = np.asarray(a, np.int64) @ np.asarray(b, np.int64)
            np.testing.assert_array_equal(got, whole.astype(np.int8))
            return
        wide = np.complex128 if dtype == "complex64" else np.float64
        expected = np.asarray(a).astype(wide) @ np.asarray(b).astype(wide)
        terms = np.abs(np.asarray(a).astype(wide)) @ np.abs(np.asarray(b).astype(wide))
        # Three roundings of values no larger than the sum of absolute terms, and float32 sums.
        bound = 3 * float(jnp.finfo(dtype).eps) * terms + 24 * 2**-24 * terms
        assert (np.abs(np.asarray(got).astype(wide) - expected) <= bound).all()
