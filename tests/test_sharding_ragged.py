"""Grouped products divided over devices: by tokens, experts, columns and the contracted k."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import MESHES, assert_close, compiled, mesh_of, normal

import jax_tcgemm

ragged_dot = functools.partial(jax_tcgemm.ragged_dot, implementation="host")
SIZES = np.array([5, 0, 9, 3, 1, 8, 2, 2], np.int32)  # 30 of 32 rows


def reference(x, w, sizes=SIZES, offset=0):
    return ragged_reference.rows(x, w, sizes, offset)


def is_ours(text):
    return 'custom_call_target="tcgemm_ragged"' in text


@MESHES
@pytest.mark.parametrize(
    ("lhs", "rhs", "collectives"),
    [
        (P("x"), P(), {}),
        (P(), P(None, None, "x"), {}),
        (P("x"), P(None, None, "y"), {}),
        (P(), P("x"), {"all-reduce": 1}),
        (P(None, "x"), P(None, "x"), {"all-reduce": 1}),
        (P("y"), P("x", None, "z"), {"all-reduce": 1}),
        (P(("x", "y")), P(), {}),
    ],
    ids=["tokens", "columns", "tokens, columns", "experts", "k", "tokens, experts, columns", "2"],
)
def test_values_collectives_and_gradients(lhs, rhs, collectives, axis_type):
    mesh = mesh_of(axis_type)
    x, w = normal(32, 6, seed=0), normal(8, 6, 10, seed=1)
    with jax.set_mesh(mesh):
        args = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((x, lhs), (w, rhs))]
        text, found = compiled(lambda x, w: ragged_dot(x, w, SIZES), *args)
        got = jax.jit(ragged_dot)(*args, SIZES)
        grads = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(ragged_dot(x, w, SIZES))), (0, 1)))
        text_of_grads, _ = compiled(grads, *args)
        grads = grads(*args)
    assert is_ours(text)
    assert is_ours(text_of_grads)
    assert "ragged-dot" not in text + text_of_grads
    assert found == collectives
    out = reference(x, w)
    assert_close(got, out)
    ct = np.cos(out)
    w_bar = np.zeros(w.shape)
    for g, (start, size) in enumerate(zip(np.cumsum(SIZES) - SIZES, SIZES, strict=True)):
        w_bar[g] = x[start : start + size].T.astype(np.float64) @ ct[start : start + size]
    assert_close(grads, (reference(ct, w.swapaxes(1, 2)), w_bar))


@MESHES
@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [(P("x"), P()), (P(), P("x")), (P(None, "x"), P(None, "x")), (P("y"), P("x", None, "z"))],
    ids=["tokens", "experts", "k", "tokens, experts, columns"],
)
def test_bias_and_activation_come_once(lhs, rhs, gathered, axis_type):
    mesh = mesh_of(axis_type)
    x, w, bias = normal(32, 6, seed=0), normal(8, 6, 10, seed=1), normal(8, 10, seed=2)
    order = np.random.default_rng(3).permutation(32).astype(np.int32) if gathered else None
    with jax.set_mesh(mesh):
        columns = P(rhs[0] if rhs else None, rhs[2] if len(rhs) > 2 else None)
        args = [
            jax.device_put(v, NamedSharding(mesh, s))
            for v, s in ((x, lhs), (w, rhs), (bias, columns))
        ]

        def f(x, w, bias):
            how = {"bias": bias, "activation": "silu", "gather_indices": order}
            return ragged_dot(x, w, SIZES, **how)

        assert is_ours(compiled(f, *args)[0])
        got = jax.jit(f)(*args)
    rows = x if order is None else x[order]
    z = reference(rows, w) + reference(np.ones((32, 1)), bias[:, None])
    assert_close(got, z / (1 + np.exp(-z)))


@pytest.mark.parametrize("mesh_sizes", [(2, 2, 2), (1, 1, 1)], ids=["eight", "one"])
def test_xlas_own_product_over_explicit_axes(mesh_sizes):
    """Of which it has no rule: lax.ragged_dot must be told how its result is divided."""
    x, w = normal(32, 6, seed=0), normal(8, 6, 10, seed=1)
    f = functools.partial(jax_tcgemm.ragged_dot, out_sharding=P("y", "z"), implementation="xla")
    with jax.set_mesh(mesh := mesh_of(AxisType.Explicit, mesh_sizes)):
        args = [
            jax.device_put(v, NamedSharding(mesh, s))
            for v, s in ((x, P("y")), (w, P("x", None, "z")), (SIZES, P()))
        ]
        got = jax.jit(f)(*args)
        assert jax.typeof(got).sharding.spec == P("y", "z")
        loss = jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w, args[2]))), (0, 1))
        grads = jax.jit(loss)(*args[:2])
        integers = jax.jit(f)(*(v.astype(np.int32) for v in args))
    out = reference(x, w)
    assert_close(got, out)
    ct = np.cos(out)
    assert_close(grads[0], reference(ct, w.swapaxes(1, 2)))
    assert_close(grads[1], ragged_reference.contraction(x, ct, SIZES))
    np.testing.assert_array_equal(integers, reference(*(v.astype(np.int32) for v in (x, w))))


@pytest.mark.parametrize("sizes", [[40, 2, 0], [31, 0, 0], [2**31 - 1] * 3, [3, 30, 7]], ids=str)
def test_sizes_that_say_more_than_there_are_rows(sizes):
    mesh = mesh_of(AxisType.Auto, (8,), ("x",))
    x, w = normal(32, 6, seed=0), normal(3, 6, 10, seed=1)
    sizes = np.array(sizes, np.int32)
    args = jax.device_put(x, NamedSharding(mesh, P("x"))), w, sizes
    assert_close(jax.jit(ragged_dot)(*args), ragged_dot(x, w, sizes))


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "collectives"),
    [
        (P("z"), P(None, None, "x"), P("z", "x"), {}),
        (P(), P(), P("x", "y"), {}),
        (P("z", "y"), P(None, "y"), P("z"), {"all-reduce": 1}),
        (P(None, "y"), P(None, "y"), P("y"), {"reduce-scatter": 1}),
        (P("z"), P("x"), P("z", "x"), {"reduce-scatter": 1}),
        (P("z", "y"), P(None, "y", "x"), P(None, "y"), None),
    ],
    ids=["tokens, columns", "result", "k", "k, result rows", "experts, result columns", "other"],
)
def test_out_sharding(lhs, rhs, out, collectives):
    """Whatever the operands' shardings are; forwards and backwards."""
    mesh = mesh_of(AxisType.Explicit)
    x, w = normal(32, 6, seed=0), normal(8, 6, 10, seed=1)
    with jax.set_mesh(mesh):
        args = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((x, lhs), (w, rhs))]
        f = jax.jit(functools.partial(ragged_dot, group_sizes=SIZES, out_sharding=out))
        got = f(*args)
        assert collectives in (None, compiled(f, *args)[1])
        assert jax.typeof(got).sharding.spec == P(*out, *[None] * (2 - len(out)))
        grads = jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)))(*args)
    assert_close(got, reference(x, w))
    assert_close(grads[0], 2 * reference(reference(x, w), w.swapaxes(1, 2)), terms=512)


def test_out_sharding_of_the_contraction():
    """Sums over the tokens of each group, which are divided, leave the groups divided."""
    mesh = mesh_of(AxisType.Explicit)
    x, y = normal(32, 6, seed=0), normal(32, 10, seed=1)
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    how = {"group_sizes": SIZES, "ragged_dot_dimension_numbers": numbers, "out_sharding": P("x")}
    f = functools.partial(jax_tcgemm.ragged_dot_general, implementation="host", **how)
    with jax.set_mesh(mesh):
        args = [jax.device_put(v, NamedSharding(mesh, P("x"))) for v in (x, y)]
        _, found = compiled(f, *args)
        got = jax.jit(f)(*args)
        # The same product, batched: now what is returned is not what the primitive returns.
        batched = jax.jit(jax.vmap(f))(*(jnp.stack([a, 2 * a]) for a in args))
    assert found == {"reduce-scatter": 1}
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 3)
    expected = ragged_reference.contraction(x, y, SIZES)
    assert_close(got, expected)
    assert_close(batched, np.stack([expected, 4 * expected]), terms=256)


@MESHES
@pytest.mark.parametrize("offset", [1, 9, 2**31 - 1, -3])
def test_an_offset_of_divided_groups(offset, axis_type):
    """Four of the groups, two on each device, from an offset that may be out of range."""
    mesh = mesh_of(axis_type)
    x, w = normal(32, 6, seed=0), normal(4, 6, 10, seed=1)
    with jax.set_mesh(mesh):
        args = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((x, P()), (w, P("x")))]
        f = jax.jit(lambda x, w: ragged_dot(x, w, SIZES, group_offset=np.int32(offset)))
        assert is_ours(compiled(f, *args)[0])
        assert_close(f(*args), reference(x, w, offset=max(offset, 0)))


@pytest.mark.parametrize("rows", [30, 13, 3])
def test_uneven_rows(rows):
    mesh = mesh_of(AxisType.Auto, (8,), ("x",))
    x, w = normal(32, 6, seed=0), normal(8, 6, 10, seed=1)

    def f(x, w):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, P("x")))[:rows]
        return ragged_dot(x, w, SIZES)

    assert is_ours(compiled(f, x, w)[0])
    sizes = np.diff(np.minimum(np.cumsum(SIZES), rows), prepend=0)
    assert_close(jax.jit(f)(x, w), reference(x[:rows], w, sizes))


@MESHES
def test_vmap_with_one_set_of_sizes(axis_type):
    mesh = mesh_of(axis_type)
    x, w = normal(4, 32, 6, seed=0), normal(4, 8, 6, 10, seed=1)
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(v, NamedSharding(mesh, s))
            for v, s in ((x, P("x", "y")), (w, P("x", None, None, "z")))
        ]
        f = jax.vmap(ragged_dot, (0, 0, None))
        text, found = compiled(lambda x, w: f(x, w, SIZES), *args)
        got = jax.jit(f)(*args, SIZES)
    assert is_ours(text)
    if axis_type == AxisType.Auto:
        assert not found
    assert_close(got, np.stack([reference(*pair) for pair in zip(x, w, strict=True)]))


@pytest.mark.parametrize("check_vma", [True, False])
def test_expert_and_data_parallelism_by_hand(check_vma):
    """Tokens over one axis, experts over the other: each device by group_offset, then a sum."""
    mesh = mesh_of(AxisType.Auto, (2, 4), ("data", "expert"))
    x, w = normal(2, 32, 6, seed=0), normal(8, 6, 10, seed=1)

    def layer(x, w):
        first = lax.axis_index("expert") * w.shape[0]
        return lax.psum(ragged_dot(x[0], w, SIZES, group_offset=first), "expert")[None]

    f = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=(P("data"), P("expert")),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    expected = np.stack([reference(rows, w) for rows in x])
    assert_close(jax.jit(f)(x, w), expected)
    assert is_ours(compiled(f, x, w)[0])
    got = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))(x, w)
    whole = jax.grad(
        lambda x, w: sum(jnp.sum(jnp.sin(ragged_dot(rows, w, SIZES))) for rows in x), (0, 1)
    )
    assert_close(got, whole(jnp.asarray(x), jnp.asarray(w)))


def test_explain_shows_what_each_device_does():
    mesh = mesh_of(AxisType.Explicit)
    x, w = normal(32, 6, seed=0), normal(8, 6, 10, seed=1)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("y")))
        w = jax.device_put(w, NamedSharding(mesh, P("x", None, "z")))
        (call,) = jax_tcgemm.explain(ragged_dot, x, w, SIZES, platform="cpu")
    problem = call.problem
    assert (problem.m, problem.n, problem.k, problem.groups) == (16, 5, 6, 4)
