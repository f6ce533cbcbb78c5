"""Contractions over the tokens of groups of quantized operands: values, and what runs them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference
from jax.lax import RaggedDotDimensionNumbers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import QuantizedArray, quantize

SIZES = np.array([7, 0, 130, 2, 90, 1, 6, 5], np.int32)  # 241 of 250 tokens
TOKENS, M, N = 250, 96, 64
LAST = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (1,), ())
FIRST = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
# As they are quantized, tokens last. Of 250 tokens the last block of 128 is short.
SCALINGS = {
    "blocks": ({"block": (1, 128)}, {"block": (1, 128)}),
    "large blocks": ({"block": (1, 128)}, {"block": (64, 128)}),
    "rows": ({"axis": -1}, {"axis": -1}),
    "one": ({}, {}),
}


def operands(scaling="blocks", dtype="float8_e4m3fn"):
    """(m, tokens) and (n, tokens), of magnitudes that differ from token to token."""
    size = jnp.exp(normal(TOKENS, seed=2))
    pairs = zip((normal(M, TOKENS), normal(N, TOKENS, seed=1)), SCALINGS[scaling], strict=True)
    return [quantize(x * size, dtype, **how) for x, how in pairs]


def exact(x):
    return np.asarray(jax_tcgemm.dequantize(x)).astype(np.float64)


def expected(x, y, sizes=SIZES):
    return ragged_reference.contraction(exact(x).T, exact(y).T, sizes)


def near(got, wanted, tolerance=1e-5):
    np.testing.assert_allclose(got, wanted, tolerance, tolerance * abs(wanted).max())


product = functools.partial(
    jax_tcgemm.ragged_dot_general, ragged_dot_dimension_numbers=LAST, group_sizes=SIZES
)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_values(scaling, dtype):
    x, y = operands(scaling, dtype)
    out = jax.jit(product)(x, y)
    assert (out.shape, out.dtype) == ((len(SIZES), M, N), jnp.float32)
    near(out, expected(x, y))
    assert not np.asarray(out)[1].any()
    turned = jax_tcgemm.ragged_dot_general(x.mT, y.mT, SIZES, FIRST)
    near(turned, expected(x, y))
    rounded = product(x, y, preferred_element_type=jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16
    near(rounded.astype(jnp.float32), expected(x, y), 2**-8)


def test_other_operands():
    """Of two dtypes, beside an array, over more dimensions, and with a group dimension."""
    (x, y), (z, _) = operands(), operands(dtype="float8_e5m2")
    near(product(x, z), ragged_reference.contraction(exact(x).T, exact(z).T, SIZES))
    array = jax_tcgemm.dequantize(y)
    near(product(x, array), expected(x, y), 1e-4)
    batched = RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), (2,), ())
    both = [jax.tree.map(lambda a: jnp.stack([a, a]), each) for each in (x, y)]
    out = jax_tcgemm.ragged_dot_general(*both, SIZES, batched)
    near(out[:, 1], expected(x, y), 1e-4)
    rows = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    w = quantize(normal(len(SIZES), TOKENS, N), axis=1)
    out = jax_tcgemm.ragged_dot_general(x, w, np.full(8, 9, np.int32), rows)
    near(out, ragged_reference.rows(exact(x), exact(w), [9] * 8), 1e-4)


def test_offset():
    x, y = operands()
    near(product(x, y, group_offset=3)[:5], expected(x, y)[3:])


# --- what runs them -------------------------------------------------------------------------------


def calls(scaling, dtype="float8_e4m3fn", tokens=8192, **how):
    types = [jax.ShapeDtypeStruct((x, tokens), jnp.float32) for x in (1024, 2048)]
    pairs = zip(types, SCALINGS[scaling], strict=True)
    given = [jax.eval_shape(functools.partial(quantize, dtype=dtype, **own), x) for x, own in pairs]
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    numbers = {"ragged_dot_dimension_numbers": LAST}
    f = functools.partial(jax_tcgemm.ragged_dot_general, **numbers, **how)
    return list(jax_tcgemm.explain(lambda *x: f(*x), *given, sizes, platform="cuda"))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_one_call_of_the_kernel(scaling):
    (call,) = calls(scaling)
    assert (call.implementation, call.copies) == ("wgmma", ())
    assert call.problem.tokens_last
    a, b = call.problem.scales
    rows = {"blocks": (1, 1), "large blocks": (1, 64), "rows": (1, 1), "one": (1024, 2048)}
    assert (a.rows, b.rows) == rows[scaling]
    assert (a.depth == 128) == (b.depth == 128) == ("blocks" in scaling)
    assert (a.outer_stride, a.inner_stride) == (0, 0)


def test_tokens_are_padded():
    (call,) = calls("blocks", tokens=8200)
    assert call.copies == ("lhs padded to 8208 tokens", "rhs padded to 8208 tokens")
    assert (call.problem.scales[0].row_stride, call.problem.scales[0].k_stride) == (1, 1024)


def test_what_is_asked_for_runs_or_refuses():
    (call,) = calls("blocks", implementation="wgmma", config="128x256x64_c2x1x1_co")
    assert call.config == "128x256x64_c2x1x1_co"
    with pytest.raises(ValueError, match=r"^ragged_dot_general: .*mma_sync.* no block scales"):
        calls("blocks", implementation="mma_sync")
    with pytest.raises(ValueError, match=r"^ragged_dot_general: .* makes float32 from int8"):
        calls("rows", "int8", implementation="wgmma")


def test_integers_are_multiplied_as_bfloat16():
    (call,) = calls("rows", "int8")
    assert (call.implementation, call.problem.in_dtype) == ("wgmma", "bf16")


# --- what JAX does with them ----------------------------------------------------------------------


def test_mapped():
    """Operands with their scales, scales alone, and sizes."""
    x, y = operands()
    twice = QuantizedArray(x.qvalue, 2 * x.scale, block=x.block)
    both = jax.tree.map(lambda *each: jnp.stack(each), x, twice)
    got = jax.vmap(lambda x: product(x, y))(both)
    near(got[1], 2 * expected(x, y))
    of_scale = jax.vmap(lambda s: product(QuantizedArray(x.qvalue, s, block=x.block), y))
    near(of_scale(jnp.stack([x.scale, 3 * x.scale]))[1], 3 * expected(x, y))
    sizes = jnp.stack([SIZES, SIZES[::-1]])
    got = jax.vmap(lambda sizes: product(x, y, group_sizes=sizes))(sizes)
    near(got[1], expected(x, y, SIZES[::-1]))


def test_derivatives():
    """By scales: the product is linear in those of either operand."""
    x, y = operands()

    def of(s, t):
        lhs, rhs = (QuantizedArray(q.qvalue, z, block=q.block) for q, z in ((x, s), (y, t)))
        return product(lhs, rhs)

    ds, dt = normal(*x.scale.shape, seed=2), normal(*y.scale.shape, seed=3)
    _, tangent = jax.jvp(of, (x.scale, y.scale), (ds, dt))
    moved = expected(QuantizedArray(x.qvalue, ds, block=x.block), y)
    moved = moved + expected(x, QuantizedArray(y.qvalue, dt, block=y.block))
    near(tangent, moved, 1e-4)
    ct = normal(len(SIZES), M, N, seed=4)
    bars = jax.grad(lambda *each: (of(*each) * ct).sum(), (0, 1))(x.scale, y.scale)
    along = sum(jnp.vdot(bar, d) for bar, d in zip(bars, (ds, dt), strict=True))
    near(along, (np.asarray(ct, np.float64) * moved).sum(), 1e-3)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("specs", [(P("x"), P()), (P(), P("x")), (P(), P())], ids=str)
def test_divided(axis_type, specs):
    """Rows of either operand with their scales; each device has all tokens."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=jax.devices("cpu")[:4])
    x, y = operands()
    with jax.set_mesh(mesh):
        placed = [
            jax.tree.map(lambda a, spec=spec: jax.device_put(a, NamedSharding(mesh, spec)), each)
            for each, spec in zip((x, y), specs, strict=True)
        ]
        got = jax.jit(product)(*placed)
    near(got, expected(x, y))


def test_bad_input():
    x, y = operands()
    with pytest.raises(ValueError, match=r"^ragged_dot_general: rhs.scale must have as many"):
        product(x, QuantizedArray(y.qvalue, y.scale[:, :1].repeat(3, 1)))
    with pytest.raises(TypeError, match=r"^ragged_dot_general: preferred_element_type must be"):
        product(x, y, preferred_element_type=jnp.int32)
