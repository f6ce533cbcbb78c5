"""Grouped products with scales of blocks: what runs them, derivatives, mapped and divided ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm
from jax_tcgemm import QuantizedArray, quantize

SIZES = np.array([7, 0, 30, 2, 9, 1, 6, 5], np.int32)  # 60 of 64 rows
M, N, K, GROUPS = 64, 128, 256, len(SIZES)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def operands():
    """Tokens by (1, 128), and matrices by (128, 128), as (groups, k, n)."""
    w = quantize(normal(GROUPS, N, K, seed=1), block=(128, 128)).mT
    return quantize(normal(M, K), block=(1, 128)), w


def exact(x):
    return np.asarray(jax_tcgemm.dequantize(x)).astype(np.float64)


def near(got, expected, tolerance=1e-5):
    np.testing.assert_allclose(got, expected, tolerance, tolerance * abs(expected).max())


def expected_product():
    x, w = operands()
    return ragged_reference.rows(exact(x), exact(w), SIZES)


# --- what runs them -------------------------------------------------------------------------------


def calls(f, *args):
    return list(jax_tcgemm.explain(f, *args, platform="cuda"))


def large(dtype="float8_e4m3fn", blocks=((1, 128), (128, 128))):
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8192, 1024), (8, 2048, 1024)))
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    of_x, of_w = (functools.partial(quantize, dtype=dtype, block=block) for block in blocks)
    return jax.eval_shape(of_x, x), jax.eval_shape(of_w, w), sizes


def test_one_call_of_the_kernel():
    def layer(x, w, sizes):
        bias = jnp.ones((8, 2048))
        return jax_tcgemm.ragged_dot(x, w.mT, sizes, bias=bias, activation="silu")

    (call,) = calls(layer, *large())
    assert call.implementation == "wgmma"
    assert call.copies == ("rhs transposed to (groups, n, k)",)
    a, b = call.problem.scales
    assert (a.rows, a.depth, a.inner_stride) == (1, 128, 0)
    assert (b.rows, b.depth, b.inner_stride) == (128, 128, 8 * 16)
    assert "scaled 1x128 by 128x128" in str(call.problem)


def test_products_of_epilogues_that_no_kernel_computes_are_one_call():
    def layer(x, w, sizes):
        return jax_tcgemm.ragged_dot(x, w.mT, sizes, epilogue=lambda acc: jnp.cumsum(acc, 1))

    (call,) = calls(layer, *large())
    assert (call.implementation, call.problem.out_dtype) == ("wgmma", "f32")
    assert "scaled 1x128 by 128x128" in str(call.problem)


def test_gradients_by_matrices_of_another_8_bit_float():
    """Which no kernel multiplies, and bfloat16 has exactly."""
    x, w = (quantize(normal(M, K), "float8_e5m2", axis=-1), quantize(normal(GROUPS, K, N), axis=1))
    (call,) = calls(jax_tcgemm.ragged_dot, x, w, SIZES)
    assert (call.implementation, call.problem.in_dtype) == ("wgmma", "bf16")
    near(jax_tcgemm.ragged_dot(x, w, SIZES), ragged_reference.rows(exact(x), exact(w), SIZES))


def test_integers_have_scales_of_rows_only():
    def layer(x, w, sizes):
        return jax_tcgemm.ragged_dot(x, w.mT, sizes)

    (call,) = calls(layer, *large("int8", ((1, 1024), (1, 1024))))
    assert (call.implementation, call.problem.in_dtype) == ("wgmma", "s8")
    for call in calls(layer, *large("int8")):
        assert call.implementation != "wgmma" or call.problem.in_dtype != "s8"


def test_a_kernel_that_is_asked_for_takes_its_blocks_or_refuses():
    x, w, sizes = large(blocks=((1, 64), (128, 128)))
    f = functools.partial(jax_tcgemm.ragged_dot, implementation="wgmma")
    with pytest.raises(ValueError, match="^ragged_dot: .* a multiple of 128 of k, got 64"):
        calls(lambda x, w, sizes: f(x, w.mT, sizes), x, w, sizes)


# --- what JAX does with them ----------------------------------------------------------------------


def test_mapped():
    """Tokens with their scales, scales alone, and sizes."""
    x, w = operands()
    twice = QuantizedArray(x.qvalue, 2 * x.scale)
    both = jax.tree.map(lambda *each: jnp.stack(each), x, QuantizedArray(x.qvalue, twice.scale))
    got = jax.vmap(lambda x: jax_tcgemm.ragged_dot(x, w, SIZES))(both)
    near(got[0], expected_product())
    near(got[1], 2 * expected_product())

    def of_scale(scale):
        return jax_tcgemm.ragged_dot(QuantizedArray(x.qvalue, scale), w, SIZES)

    near(jax.vmap(of_scale)(jnp.stack([x.scale, 3 * x.scale]))[1], 3 * expected_product())
    sizes = jnp.stack([SIZES, SIZES[::-1]])
    got = jax.vmap(lambda sizes: jax_tcgemm.ragged_dot(x, w, sizes))(sizes)
    near(got[1], ragged_reference.rows(exact(x), exact(w), SIZES[::-1]))


def test_derivatives():
    """By scales: the product is linear in those of either operand."""
    x, w = operands()

    def product(s, t):
        lhs, rhs = QuantizedArray(x.qvalue, s), QuantizedArray(w.qvalue, t)
        return jax_tcgemm.ragged_dot(lhs, rhs, SIZES)

    ds, dt = normal(*x.scale.shape, seed=2), normal(*w.scale.shape, seed=3)
    _, tangent = jax.jvp(product, (x.scale, w.scale), (ds, dt))
    moved = [
        ragged_reference.rows(
            exact(QuantizedArray(x.qvalue, s)), exact(QuantizedArray(w.qvalue, t)), SIZES
        )
        for s, t in ((ds, w.scale), (x.scale, dt))
    ]
    near(tangent, sum(moved), 1e-4)
    ct = normal(M, N, seed=4)
    bars = jax.grad(lambda *each: (product(*each) * ct).sum(), (0, 1))(x.scale, w.scale)
    along = sum(jnp.vdot(bar, d) for bar, d in zip(bars, (ds, dt), strict=True))
    near(along, (np.asarray(ct, np.float64) * sum(moved)).sum(), 1e-3)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("specs", [(P("x"), P()), (P(), P("x")), (P(), P())], ids=str)
def test_divided(axis_type, specs):
    """Tokens with their scales, and groups; each device has the other operand whole."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=jax.devices("cpu")[:4])
    x, w = operands()
    with jax.set_mesh(mesh):
        placed = [
            jax.tree.map(lambda a, spec=spec: jax.device_put(a, NamedSharding(mesh, spec)), each)
            for each, spec in zip((x, w), specs, strict=True)
        ]
        got = jax.jit(jax_tcgemm.ragged_dot)(*placed, SIZES)
    near(got, expected_product())
