"""combine_rows: weighted sums of rows through indices, and its derivatives."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_tcgemm

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["host", "xla"])


def operands(num_rows, columns, targets, degree, seed=0, dtype="float32"):
    """Rows, weights, and indices some of which are repeated and some outside."""
    rng = np.random.default_rng(seed)
    rows = jnp.asarray(rng.standard_normal((num_rows, columns)), dtype)
    indices = rng.integers(-2, num_rows + 2, (targets, degree), np.int32)
    return rows, indices, jnp.asarray(rng.standard_normal((targets, degree)), "float32")


def expected(rows, indices, weights=None):
    """In float64, one index after the other."""
    rows = np.asarray(rows, np.float64)
    out = np.zeros((len(indices), rows.shape[1]))
    for t, row in enumerate(np.asarray(indices)):
        for j, index in enumerate(row):
            if 0 <= index < len(rows):
                out[t] += rows[index] * (1 if weights is None else float(weights[t, j]))
    return out


def by_jax(rows, indices, weights):
    """The same as JAX differentiates it."""
    inside = (indices >= 0) & (indices < rows.shape[0])
    taken = jnp.where(inside[..., None], rows[jnp.where(inside, indices, 0)], 0)
    return jnp.einsum("tj,tjn->tn", weights, taken, precision="highest")


@IMPLEMENTATIONS
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=8, deadline=None)
def test_values(implementation, data):
    extents = [data.draw(st.integers(0, n)) for n in (9, 9, 6, 5)]
    dtype = data.draw(st.sampled_from(["float16", "bfloat16", "float32"]))
    rows, indices, weights = operands(*extents, seed=data.draw(st.integers(0, 9)), dtype=dtype)
    weights = weights if data.draw(st.booleans()) else None
    got = jax_tcgemm.combine_rows(rows, indices, weights, implementation=implementation)
    assert got.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    want = expected(rows, indices, weights)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=eps, atol=2e-5)


def test_float64(x64):
    rows, indices, _ = operands(9, 33, 12, 4)
    rows = rows.astype("float64") * np.pi
    weights = np.random.default_rng(1).standard_normal(indices.shape)
    got = jax_tcgemm.combine_rows(rows, indices, weights, implementation="host")
    np.testing.assert_allclose(got, expected(rows, indices, weights), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", ["int8", "uint16"])
def test_indices_of_any_width(dtype):
    """More rows and targets than the narrow ones can count."""
    rows, _, weights = operands(300, 2, 200, 2)
    indices = np.random.default_rng(0).integers(0, 120, (200, 2)).astype(dtype)
    grad = jax.grad(lambda r: jnp.sum(jnp.sin(jax_tcgemm.combine_rows(r, indices, weights))))
    want = jax.grad(lambda r: jnp.sum(jnp.sin(by_jax(r, indices.astype(int), weights))))
    np.testing.assert_allclose(jax.jit(grad)(rows), jax.jit(want)(rows), rtol=1e-4, atol=1e-5)


def test_sums_are_rounded_once():
    """In bfloat16 256 + 1 is 256: adding the ones first to last would lose all of them."""
    rows = jnp.array([[256.0], [1.0]], "bfloat16")
    indices = np.array([[0, *[1] * 16]])
    for implementation in ("host", "xla"):
        got = jax_tcgemm.combine_rows(rows, indices, implementation=implementation)
        assert got[0, 0] == 272


@IMPLEMENTATIONS
def test_first_and_second_derivatives(implementation):
    rows, indices, weights = operands(9, 5, 7, 3)
    ours = functools.partial(jax_tcgemm.combine_rows, implementation=implementation)

    def grads(f):
        return jax.grad(lambda r, w: jnp.sum(jnp.sin(f(r, indices, w))), (0, 1))

    def second(f):
        return jax.grad(lambda *a: sum(jnp.sum(jnp.cos(x)) for x in grads(f)(*a)), (0, 1))

    for order in (grads, second):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
            jax.jit(order(ours))(rows, weights),
            jax.jit(order(by_jax))(rows, weights),
        )
    plain = jax.grad(lambda r: jnp.sum(jnp.sin(ours(r, indices))))(rows)
    ones = jnp.ones_like(weights)
    np.testing.assert_allclose(plain, grads(by_jax)(rows, ones)[0], rtol=1e-4, atol=1e-4)


@IMPLEMENTATIONS
def test_unique_indices_sort_nothing(implementation):
    """Every row is taken once, but for one that is not; one index is outside."""
    rows, _, weights = operands(13, 5, 4, 3)
    indices = np.random.default_rng(3).permutation(13)[:12].reshape(4, 3)
    indices[2, 1] = 99

    def loss(f, **kwargs):
        return jax.grad(lambda r, w: jnp.sum(jnp.sin(f(r, indices, w, **kwargs))), (0, 1))

    kwargs = {"unique_indices": True, "implementation": implementation}
    ours = jax.jit(loss(jax_tcgemm.combine_rows, **kwargs))
    assert "stablehlo.sort" not in ours.lower(rows, weights).as_text()
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        ours(rows, weights),
        jax.jit(loss(by_jax))(rows, weights),
    )


def test_vmap_of_rows_without_columns():
    indices = jnp.zeros((2, 1), jnp.int32)
    out = jax.vmap(lambda rows: jax_tcgemm.combine_rows(rows, indices))(jnp.ones((3, 4, 0)))
    assert out.shape == (3, 2, 0)


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, 0)])
def test_vmap_and_its_gradients(mapped):
    entries = [operands(9, 5, 7, 3, seed) for seed in range(3)]
    args = [
        entries[0][i] if axis is None else jnp.stack([entry[i] for entry in entries])
        for i, axis in enumerate(mapped)
    ]
    for f in (
        lambda g: g,
        lambda g: jax.grad(lambda r, i, w: jnp.sum(jnp.sin(g(r, i, w))), (0, 2)),
    ):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
            jax.jit(jax.vmap(f(jax_tcgemm.combine_rows), mapped))(*args),
            jax.jit(jax.vmap(f(by_jax), mapped))(*args),
        )


def test_a_nan_reaches_the_sums_it_is_in():
    rows, indices, weights = operands(9, 5, 7, 3)
    indices[3, 1] = 4
    bad = np.asarray(rows).copy()
    bad[4] = np.nan
    got, clean = (jax_tcgemm.combine_rows(x, indices, weights) for x in (bad, rows))
    touched = np.any(indices == 4, 1)
    assert 0 < touched.sum() < len(touched)
    assert np.isnan(np.asarray(got)[touched]).all()
    np.testing.assert_array_equal(np.asarray(got)[~touched], np.asarray(clean)[~touched])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_divides_over_devices(axis_type):
    """Columns over one axis, and the gradient of the weights is summed over it."""
    rows, indices, weights = operands(9, 8, 6, 2)
    mesh = jax.make_mesh((4,), ("x",), (axis_type,), devices=jax.devices()[:4])
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731

    def loss(r, w):
        return jnp.sum(jnp.sin(jax_tcgemm.combine_rows(r, indices, w, implementation="host")))

    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(loss, (0, 1)))(place(rows, None, "x"), place(weights))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        [np.asarray(x) for x in got],
        [np.asarray(x) for x in jax.grad(loss, (0, 1))(rows, weights)],
    )


def test_a_gpu_runs_ours(fake_cuda):
    """Also the gradients: a sum for the rows, products for the weights."""
    fake_cuda.rows = fake_cuda.blas
    fake_cuda.rows.implementations = lambda: {"simt": ["default"]}
    rows, indices, weights = operands(9, 8, 6, 2)

    def loss(rows, weights):
        return jnp.sum(jax_tcgemm.combine_rows(rows, indices, weights) ** 2)

    calls = jax_tcgemm.explain(jax.grad(loss, (0, 1)), rows, weights, platform="cuda")
    assert [call.implementation for call in calls] == ["simt"] * 3


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"rows": jnp.zeros(3)}, ValueError, "rows must have shape (r, n)"),
        ({"rows": jnp.zeros((3, 2), int)}, TypeError, "rows must be floating point"),
        ({"indices": jnp.zeros(3, int)}, ValueError, "indices must have shape (t, j)"),
        ({"indices": jnp.zeros((3, 2))}, TypeError, "indices must be integers"),
        ({"weights": jnp.zeros((3, 1))}, ValueError, "weights must have the shape of indices"),
        ({"weights": jnp.zeros((6, 2), int)}, TypeError, "weights must be floating point"),
        ({"implementation": "wgmma"}, ValueError, "implementation must be one of simt, host, xla"),
    ],
    ids=lambda change: str(*change) if isinstance(change, dict) else "",
)
def test_refuses(change, error, says):
    rows, indices, weights = operands(9, 8, 6, 2)
    with pytest.raises(error) as info:
        jax_tcgemm.combine_rows(**{"rows": rows, "indices": indices, "weights": weights} | change)
    assert says in str(info.value)
    assert str(info.value).startswith("combine_rows: ")
    assert ", got " in str(info.value)
