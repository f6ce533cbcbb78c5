"""Products with a function as their epilogue over several devices."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from written_functions import (
    assert_near,
    collectives,
    column_sums,
    dropout_of_closed_key,
    mesh_of,
    normal,
    ours,
    position_bias,
    row_maxima,
    soft_cap,
    swish,
    theirs,
    two_results,
)

import jax_tcgemm
from jax_tcgemm.epilogues.shard_function import shard_function


def layer(acc, scale, residual):
    return {"out": jnp.tanh(acc) * scale + residual, "sign": (acc > 0).astype(jnp.int8)}


def largest(acc, scale, residual):
    return {"out": jnp.tanh(acc) * scale + residual, "largest": acc.max(-1)}


# How lhs, rhs, a vector along columns and a matrix are divided.
SPECS = {
    "m": ((P("x"), P(), P(), P("x")), []),
    "n": ((P(), P(None, "x"), P("x"), P(None, "x")), []),
    "m, n": ((P("x"), P(None, "y"), P("y"), P("x", "y")), []),
    "k": ((P(None, "x"), P("x"), P(), P()), ["all-reduce"]),
    "m, n, k": ((P("x", "z"), P("z", "y"), P("y"), P("x", "y")), ["all-reduce"]),
}


@pytest.mark.surface
@pytest.mark.parametrize("function", [layer, largest], ids=["elementwise", "with row maxima"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("specs", "expected"), SPECS.values(), ids=SPECS.keys())
def test_divided_over_devices(specs, expected, axis_type, function):
    mesh = mesh_of(axis_type)
    values = [
        normal(i, *shape, dtype="float32")
        for i, shape in enumerate([(16, 24), (24, 32), (32,), (16, 32)])
    ]
    how = {}
    if axis_type == AxisType.Explicit:
        how["out_sharding"] = NamedSharding(mesh, specs[-1])

    def grads(f):
        return jax.grad(lambda *args: jnp.sin(f(*args)["out"]).sum(), (0, 1, 2, 3))

    with jax.set_mesh(mesh):
        pairs = zip(values, specs, strict=True)
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
        f = ours(function, **how)
        text, found = collectives(f, *args)
        got, got_grads = jax.jit(f)(*args), jax.jit(grads(f))(*args)
    assert 'custom_call_target="tcgemm_gemm"' in text
    if function is layer:
        assert found == expected
    with jax.default_device(jax.devices("cpu")[0]):
        assert_near(jax.device_get(got), jax.device_get(theirs(function)(*values)), 4e-6)
        expected_grads = grads(theirs(function))(*values)
        assert_near(jax.device_get(got_grads), jax.device_get(expected_grads), 1e-5)


@pytest.mark.surface
@pytest.mark.parametrize(
    ("specs", "in_axes"),
    [
        ((P("x", "y"), P(None, "z"), P("z")), (0, None, None)),
        ((P("x"), P("x"), P("x")), (0, 0, 0)),
        ((P("y"), P("x"), P()), (None, 0, None)),
        ((P("y"), P(), P("x")), (None, None, 0)),
    ],
    ids=["lhs", "all", "rhs", "an operand"],
)
def test_vmap_over_what_explicit_axes_divide(specs, in_axes):
    shapes = [[8, 6], [6, 10], [10]]
    for shape, axis in zip(shapes, in_axes, strict=True):
        shape[:0] = [] if axis is None else [4]
    mesh = mesh_of(AxisType.Explicit)

    def f(acc, scale):
        return jnp.tanh(acc) * scale, acc.max(-1)

    def grads(f):
        return jax.grad(lambda *args: sum(jnp.sin(y).sum() for y in f(*args)), (0, 1, 2))

    with jax.set_mesh(mesh):
        args = [
            jax.device_put(normal(i, *shape), NamedSharding(mesh, spec))
            for i, (shape, spec) in enumerate(zip(shapes, specs, strict=True))
        ]
        for of in (lambda f: f, grads):
            got, expected = (
                jax.jit(jax.vmap(of(product(f)), in_axes))(*args) for product in (ours, theirs)
            )
            assert [x.sharding for x in got] == [x.sharding for x in expected]
            assert_near(jax.device_get(got), jax.device_get(expected), 1e-5)


@pytest.mark.surface
def test_shardings_of_jit():
    mesh = mesh_of(AxisType.Auto)
    args = [normal(i, *shape, dtype="float32") for i, shape in enumerate([(16, 24), (24, 32)])]
    specs = P("x"), P(None, ("y", "z"))
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    for function in (position_bias, dropout_of_closed_key, soft_cap, row_maxima):
        f = jax.jit(ours(function), in_shardings=shardings)
        assert_near(jax.device_get(f(*args)), jax.device_get(theirs(function)(*args)), 4e-6)


@pytest.mark.surface
def test_shard_map():
    mesh = mesh_of(AxisType.Auto)
    x, w, b = normal(0, 16, 24), normal(1, 24, 32), normal(2, 32)

    def grads(f):
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
        def on_devices(x, w, b):
            return f(x, w, b)

        return jax.jit(jax.grad(lambda *args: jnp.sin(on_devices(*args)).sum(), (0, 1, 2)))

    for function in (swish, lambda acc, b: acc + b, lambda acc, b: jnp.where(acc > 0, acc, 0.0)):
        got, expected = grads(ours(function))(x, w, b), grads(theirs(function))(x, w, b)
        assert_near(jax.device_get(got), jax.device_get(expected), 1e-5)

    def numbered(x, w, b):
        return ours(lambda acc, b: acc * b + lax.axis_index("x"))(x, w, b)

    f = jax.shard_map(numbered, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    (call,) = jax_tcgemm.explain(f, x, w, b, platform="cpu")
    assert (call.problem.m, call.problem.n, call.path) == (8, 32, ("shard_map",))

    def total(acc):
        return lax.psum(acc, "x")

    f = jax.shard_map(ours(total), mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P())
    assert_near(jax.device_get(jax.jit(f)(x, w)), jax.device_get(x @ w), 1e-5)


def test_explain_says_how_explicit_axes_divide_it():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        specs = P("x"), P(None, "y")
        args = [
            jax.device_put(normal(i, *shape, dtype="float32"), NamedSharding(mesh, spec))
            for i, (shape, spec) in enumerate(zip([(16, 24), (24, 32)], specs, strict=True))
        ]
        (call,) = jax_tcgemm.explain(ours(soft_cap), *args, platform="cpu")
        (other,) = jax_tcgemm.explain(ours(row_maxima), *args, platform="cpu")
    assert (call.problem.m, call.problem.n) == (8, 16)
    assert "divide a dimension that the function takes whole" in other.why


@pytest.mark.parametrize("function", [layer, largest, position_bias, column_sums, two_results])
def test_shard_functions_return_shards_of_the_results(function):
    acc = normal(0, 8, 12, dtype="float32")
    operands = [normal(1, 12, dtype="float32"), normal(2, 8, 12, dtype="float32")]
    operands = operands[: function.__code__.co_argcount - 1]
    of_shards = shard_function(jax.make_jaxpr(function)(acc, *operands))
    slices = [slice(None) if dim in of_shards.whole else slice(2, 4) for dim in range(2)]

    def shard(x, dims):
        return x[tuple(slice(None) if dim is None else slices[dim] for dim in dims)]

    got = of_shards(shard(acc, (0, 1)), *map(shard, operands, of_shards.operands))
    whole = jax.tree.leaves(function(acc, *operands))
    if function is column_sums:  # The sum over all shards.
        whole[1] = whole[0][slices[0]].sum(0)
    assert_near(got, list(map(shard, whole, of_shards.results)), 1e-6)
