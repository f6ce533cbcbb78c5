"""Products of 8-bit floats by the public functions: dtypes, choices, scales and derivatives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_tcgemm
from jax_tcgemm import tensor

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
NT = (((1,), (1,)), ((), ()))
FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
LARGE, TOO_LARGE = "128x256x64_c2x1x1_co", "192x192x64_c1x1x1_co"


def draw(seed, *shape, dtype=E4M3):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def exact(x):
    return np.asarray(x).astype(np.float64)


def near(got, expected, tolerance=1e-5):
    """Float32 sums of a few hundred products that are exact, against float64."""
    np.testing.assert_allclose(exact(got), expected, rtol=0, atol=tolerance * abs(expected).max())


# --- plain products -----------------------------------------------------------------------------


@pytest.mark.parametrize(("a_dtype", "b_dtype"), PAIRS)
@pytest.mark.parametrize("precision", [None, "ANY_F8_ANY_F8_F32", FAST])
def test_values(a_dtype, b_dtype, precision):
    a, b = draw(0, 33, 200, dtype=a_dtype), draw(1, 65, 200, dtype=b_dtype)
    how = {"precision": precision, "preferred_element_type": jnp.float32}
    near(jax_tcgemm.dot_general(a, b, NT, **how), exact(a) @ exact(b).T)


def test_default_dtypes_are_those_of_jax():
    a, b = draw(0, 3, 5, 16), draw(1, 16, 7)
    for ours, theirs in (
        (jax_tcgemm.matmul(a, b), jnp.matmul(a, b)),
        (tensor.einsum("bik,kn->bin", a, b), jnp.einsum("bik,kn->bin", a, b)),
        (jax_tcgemm.linear(a, b), jnp.matmul(a, b)),
    ):
        assert ours.dtype == theirs.dtype == E4M3
        np.testing.assert_array_equal(ours, theirs)
    near(jax_tcgemm.matmul(a, b, preferred_element_type="float32"), exact(a) @ exact(b))


def test_derivatives_of_float32_results():
    """A float32 cotangent is not rounded to 8 bits before it is multiplied."""
    a, b = draw(0, 24, 40), draw(1, 40, 16, dtype=E5M2)
    g = jax.random.normal(jax.random.key(2), (24, 16)) / 4096
    for epilogue in (None, lambda acc: acc):
        how = {"preferred_element_type": None if epilogue else jnp.float32, "epilogue": epilogue}

        def f(a, b, how=how):
            numbers = (((1,), (0,)), ((), ()))
            return jax_tcgemm.dot_general(a, b, numbers, **how)

        a_bar, b_bar = jax.vjp(f, a, b)[1](g)
        assert (a_bar.dtype, b_bar.dtype) == (E4M3, E5M2)
        # Half a step of the last bit of either dtype, or of its subnormal numbers.
        expected = exact(g) @ exact(b).T
        np.testing.assert_allclose(exact(a_bar), expected, rtol=2**-3.9, atol=2**-10)
        np.testing.assert_allclose(exact(b_bar), exact(a).T @ exact(g), rtol=2**-2.9, atol=2**-17)


def calls(f, *shapes, dtypes=(E4M3, E4M3), platform="cuda"):
    args = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]
    return list(jax_tcgemm.explain(f, *args, platform=platform))


@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("precision", [None, "ANY_F8_ANY_F8_F32", FAST])
def test_wgmma_is_chosen(dtypes, precision):
    def f(a, b):
        how = {"precision": precision, "preferred_element_type": "bfloat16"}
        return jax_tcgemm.dot_general(a, b, NT, **how)

    (call,) = calls(f, (4096, 7168), (4096, 7168), dtypes=dtypes)
    assert call.implementation == "wgmma"
    assert call.problem.compute == ("f32_fast_accum" if precision == FAST else "f32")
    assert call.copies == ()
    assert call.workspace_bytes == 0
    assert re.match("the cost model predicts", call.why)
    assert call.roofline_us == pytest.approx(2 * 4096**2 * 7168 / 1978.9e6, rel=1e-3)


def test_operands_that_are_not_k_major_are_copied():
    (call,) = calls(lambda a, b: jax_tcgemm.matmul(a, b), (512, 1024), (1024, 768))
    assert call.implementation == "wgmma"
    assert call.workspace_bytes >= 1024 * 768
    # The result is rounded to 8 bits by XLA.
    assert [x for x in call.copies if "converted to float8_e4m3fn" in x]


def test_too_large_a_tile_is_refused_by_name():
    def f(precision, config=TOO_LARGE):
        how = {"precision": precision, "preferred_element_type": "float32"}
        how |= {"implementation": "wgmma", "config": config}
        return lambda a, b: jax_tcgemm.dot_general(a, b, NT, **how)

    refused = (
        rf"dot_general: .* config {TOO_LARGE} has too many accumulators .* FAST_ACCUM leave them"
    )
    with pytest.raises(ValueError, match=refused):
        calls(f(None), (256, 256), (256, 256))
    assert calls(f(FAST), (256, 256), (256, 256))[0].config == TOO_LARGE
    assert calls(f(None, LARGE), (256, 256), (256, 256))[0].config == LARGE


@pytest.mark.parametrize("implementation", ["host", "mma_sync", "cublaslt"])
def test_others_refuse_by_name(implementation):
    platform = "cpu" if implementation == "host" else "cuda"
    how = {"implementation": implementation, "preferred_element_type": "float32"}
    refused = f"matmul: implementation must be able to run .*{implementation} cannot run this: "
    with pytest.raises(ValueError, match=refused):
        calls(lambda a, b: jax_tcgemm.matmul(a, b, **how), (32, 32), (32, 32), platform=platform)


def test_presets_of_8_bit_floats_are_for_those():
    x = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)
    f = lambda x: jax_tcgemm.matmul(x, x, precision=FAST, implementation="wgmma")  # noqa: E731
    with pytest.raises(ValueError, match="is for float8_e4m3fn and float8_e5m2"):
        jax_tcgemm.explain(f, x, platform="cuda")


def test_grouped_products_are_left_to_xla():
    x, w, sizes = draw(0, 6, 8), draw(1, 2, 8, 4), jnp.array([4, 2])
    f = lambda x, w: jax_tcgemm.ragged_dot(  # noqa: E731
        x, w, sizes, preferred_element_type=jnp.float32
    )
    rows = np.concatenate([exact(x)[:4] @ exact(w)[0], exact(x)[4:] @ exact(w)[1]])
    near(f(x, w), rows)
    assert calls(f, x.shape, w.shape)[0].implementation == "xla"


# --- scaled products ----------------------------------------------------------------------------

SCALES = {
    "tensor": ((), ()),
    "tensor as a matrix": ((1, 1), (1, 1)),
    "rows": ((64, 1), (48, 1)),
    "rows and tensor": ((64, 1), ()),
    "blocks of rows": ((4, 1), (3, 1)),
    "blocks of K": ((64, 2), (3, 2)),
    "blocks of one": ((64, 4), (48, 1)),
}


def scales(seed, shape):
    return jnp.exp(jax.random.normal(jax.random.key(seed), shape))


def repeated(scale, shape):
    scale = np.broadcast_to(exact(scale), (1,) * (len(shape) - np.ndim(scale)) + np.shape(scale))
    for axis, extent in enumerate(shape):
        scale = np.repeat(scale, extent // scale.shape[axis], axis)
    return scale


@pytest.mark.parametrize("name", SCALES)
def test_scaled_values_and_derivatives(name):
    x, w = draw(0, 64, 256), draw(1, 48, 256, dtype=E5M2)
    s, t = (scales(i, shape) for i, shape in enumerate(SCALES[name]))
    out = jax.jit(jax_tcgemm.scaled_matmul)(x, w, s, t)
    wide = [exact(a) * repeated(b, a.shape) for a, b in ((x, s), (w, t))]
    near(out, wide[0] @ wide[1].T)
    assert out.dtype == jnp.float32
    narrow = jax_tcgemm.scaled_matmul(x, w, s, t, preferred_element_type=jnp.bfloat16)
    np.testing.assert_array_equal(narrow, out.astype(jnp.bfloat16))

    g = jax.random.normal(jax.random.key(4), out.shape)
    f = lambda s, t: jax_tcgemm.scaled_matmul(x, w, s, t)  # noqa: E731
    s_bar, t_bar = jax.vjp(f, s, t)[1](g)

    def reference(s, t):
        def of(a, scale):
            # As many copies of each as it is repeated.
            for axis, extent in enumerate(a.shape if scale.ndim else ()):
                scale = jnp.repeat(scale, extent // scale.shape[axis], axis)
            return a.astype(jnp.float64) * scale

        return of(x, s) @ of(w, t).T

    with jax.enable_x64(True):
        expected = jax.vjp(reference, s.astype(jnp.float64), t.astype(jnp.float64))[1](
            g.astype(jnp.float64)
        )
    near(s_bar, exact(expected[0]), 1e-4)
    near(t_bar, exact(expected[1]), 1e-4)


def test_scaled_batches():
    x, w = draw(0, 2, 3, 8, 32), draw(1, 2, 3, 16, 32)
    s, t = scales(2, (2, 3, 8, 1)), scales(3, (2, 1, 1, 1))
    expected = np.einsum("abmk,abnk->abmn", exact(x) * exact(s), exact(w) * exact(t))
    near(jax_tcgemm.scaled_matmul(x, w, s, t), expected)
    # As jax.nn's, of one batch dimension and scales of blocks.
    s, t = scales(2, (3, 8, 4)), scales(3, (3, 16, 4))
    ours = jax_tcgemm.scaled_matmul(x[0], w[0], s, t)
    of_blocks = (exact(own) * np.repeat(exact(by), 8, -1) for own, by in ((x[0], s), (w[0], t)))
    near(ours, np.einsum("bmk,bnk->bmn", *of_blocks))
    # One matrix of weights for a whole batch of rows.
    one, t = w[0, 0], scales(4, (16, 1))
    s = scales(5, (2, 3, 8, 1))
    near(jax_tcgemm.scaled_matmul(x, one, s, t), exact(x) * exact(s) @ (exact(one) * exact(t)).T)
    mapped = jax.vmap(jax_tcgemm.scaled_matmul, (0, None, 0, None))(x[0], one, s[0], t)
    near(mapped, exact(x[0]) * exact(s[0]) @ (exact(one) * exact(t)).T)


def scaled_calls(s, t, **how):
    f = lambda *args: jax_tcgemm.scaled_matmul(*args, **how)  # noqa: E731
    shapes = (4096, 7168), (4096, 7168), s, t
    return calls(f, *shapes, dtypes=(E4M3, E4M3, jnp.float32, jnp.float32))


@pytest.mark.parametrize("shapes", [((), ()), ((4096, 1), (4096, 1))])
def test_scales_are_an_epilogue_of_one_call(shapes):
    for how in ({}, {"implementation": "wgmma"}):
        (call,) = scaled_calls(*shapes, **how)
        assert call.implementation == "wgmma"
        assert call.problem.epilogue.function is not None
        assert call.problem.compute == "f32"


WRONG = {
    "a scale too few": ({"lhs_scales": jnp.ones((7, 1))}, ValueError, "lhs_scales must have the s"),
    "a row": ({"rhs_scales": jnp.ones(8)}, ValueError, "rhs_scales must have the shape"),
    "other blocks": ({"rhs_scales": jnp.ones((8, 3))}, ValueError, r"\(8, 1\) or, with a scale"),
    "none": ({"rhs_scales": jnp.ones((8, 0))}, ValueError, "rhs_scales must have the shape"),
    "integer scales": ({"lhs_scales": 3}, TypeError, "lhs_scales must be of a real floating"),
    "complex scales": ({"lhs_scales": 3j}, TypeError, "lhs_scales must be of a real floating"),
    "a vector": ({"lhs": jnp.ones(16, E4M3)}, ValueError, "lhs must have at least two"),
    "another K": ({"lhs": jnp.ones((8, 15), E4M3)}, ValueError, "the same last dimension"),
    "batches": ({"rhs": jnp.ones((2, 8, 16), E4M3)}, ValueError, "or the batch dimensions of lhs"),
    "unlike dtypes": (
        {"rhs": jnp.ones((8, 16))},
        TypeError,
        "must have one dtype, or both be floats of 8 or 4 bits",
    ),
    "scales of truth values": (
        {"lhs_scales": np.ones((8, 2), bool)},
        TypeError,
        "lhs_scales must be of a real floating-point dtype",
    ),
    "truth values": ({"rhs": jnp.ones((8, 16), bool)}, TypeError, "rhs must have a real dtype"),
    "integers": ({"preferred_element_type": int}, TypeError, "must be a real floating-point dtype"),
    "no such name": ({"implementation": "magic"}, ValueError, "implementation must be one of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name):
    changed, kind, message = WRONG[name]
    given = {"lhs": jnp.ones((8, 16), E4M3), "rhs": jnp.ones((8, 16), E4M3)}
    given |= {"lhs_scales": jnp.float32(1), "rhs_scales": jnp.float32(1)} | changed
    with pytest.raises(kind, match=f"^scaled_matmul: .*{message}.*, got .*; "):
        jax_tcgemm.scaled_matmul(**given)


def test_precision_of_lax():
    """A preset itself, as lax.dot_general takes it."""
    a, b = draw(0, 16, 32), draw(1, 8, 32)
    preset = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
    how = {"precision": preset, "preferred_element_type": jnp.float32}
    near(jax_tcgemm.dot_general(a, b, NT, **how), exact(a) @ exact(b).T)
    s = jnp.float32(2)
    near(jax_tcgemm.scaled_matmul(a, b, s, s, precision=preset), 4 * exact(a) @ exact(b).T)
    blocks = jnp.ones((16, 2))
    near(jax_tcgemm.scaled_matmul(a, b, blocks, s, precision=preset), 2 * exact(a) @ exact(b).T)
