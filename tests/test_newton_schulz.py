"""`newton_schulz` and `scale_by_muon`: values, forms, derivatives and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_tcgemm
from jax_tcgemm.products import muon
from jax_tcgemm.products import newton_schulz as module

MUON = (3.4445, -4.7750, 2.0315)
DION = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
FORMS = ["standard", "gram"]


def draw(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def ill_conditioned(m, n, seed=0):
    """Singular values over five decades."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(size, m)))[0] for size in (m, n))
    return jnp.asarray((u * np.logspace(0, -5, m)) @ v.T, np.float32)


def nearly_parallel(count, m, n, seed=0):
    """Matrices of rows that are multiples of one but for differences of 1e-3 to 1."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, m, 1)) * rng.normal(size=(count, 1, n))
    scale = 10 ** rng.uniform(-3, 0, (count, 1, 1))
    return jnp.asarray(rows + scale * rng.normal(size=(count, m, n)), np.float32)


def exact(g, coefficients=MUON, steps=5, eps=1e-8):
    x = np.asarray(g).astype(np.float64)
    x = x / (np.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)
    for a, b, c in np.broadcast_to(coefficients, (steps, 3)):
        gram = x @ np.swapaxes(x, -2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def error(got, expected):
    """The largest relative Frobenius error of a matrix."""
    off = np.linalg.norm(np.asarray(got, np.float64) - expected, axis=(-2, -1))
    return (off / np.linalg.norm(expected, axis=(-2, -1))).max()


def largest(x):
    return np.linalg.norm(np.asarray(x, np.float64), 2, axis=(-2, -1)).max()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape", [(24, 56), (56, 24), (40, 40), (3, 17, 33), (2, 2, 33, 9), (1, 7), (7, 1)]
)
def test_values(shape, form):
    g = draw(*shape)
    got = jax_tcgemm.newton_schulz(g, dtype=jnp.float32, form=form)
    assert got.dtype == g.dtype
    assert error(got, exact(g)) < 1e-4
    assert error(jax_tcgemm.newton_schulz(g, form=form), exact(g)) < 0.06


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("given", "dtype", "tolerance"),
    [
        (jnp.bfloat16, jnp.bfloat16, 0.04),
        (jnp.float32, jnp.bfloat16, 0.03),
        (jnp.float32, jnp.float16, 5e-3),
        (jnp.float16, jnp.float32, 1e-3),
    ],
)
def test_dtypes(given, dtype, tolerance, form):
    g = draw(64, 160, dtype=given)
    got = jax_tcgemm.newton_schulz(g, dtype=dtype, form=form)
    assert got.dtype == given
    assert error(got, exact(g)) < tolerance


def test_float64():
    with jax.enable_x64(True):
        g = draw(16, 24, dtype=np.float64)
        for form in FORMS:
            got = jax_tcgemm.newton_schulz(g, dtype=jnp.float64, form=form)
            assert error(got, exact(g)) < 1e-12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_steps(steps, form):
    g = draw(20, 60)
    got = jax_tcgemm.newton_schulz(g, steps=steps, dtype=jnp.float32, form=form)
    assert error(got, exact(g, steps=steps)) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_coefficients_of_each_step(form):
    g = draw(20, 60)
    for coefficients in (DION, np.array(DION), jnp.array(DION)):
        got = jax_tcgemm.newton_schulz(g, coefficients=coefficients, dtype=jnp.float32, form=form)
        assert error(got, exact(g, DION)) < 1e-4


@pytest.mark.parametrize("shape", [(192, 768), (192, 192)])
def test_gram_is_about_as_accurate_in_bfloat16(shape):
    g = draw(*shape)
    standard, gram = (jax_tcgemm.newton_schulz(g, form=form) for form in FORMS)
    assert error(gram, exact(g)) < 2 * error(standard, exact(g)) < 0.03
    g = ill_conditioned(*shape)
    standard, gram = (jax_tcgemm.newton_schulz(g, form=form) for form in FORMS)
    assert error(gram, exact(g)) < error(standard, exact(g)) < 0.1


@pytest.mark.parametrize("coefficients", [MUON, DION], ids=["muon", "dion"])
@pytest.mark.parametrize("size", [(2, 8), (8, 32)], ids=str)
def test_gram_is_stable_in_bfloat16(size, coefficients):
    """Where the rounded x x^T has negative eigenvalues."""
    g = nearly_parallel(2000, *size)
    got = jax_tcgemm.newton_schulz(g, coefficients=coefficients, form="gram")
    assert largest(got) < 1.3


def test_segments():
    bfloat16, float64 = module._noise(np.dtype(jnp.bfloat16)), module._noise(np.dtype(np.float64))
    assert module.stable_segments([MUON] * 5, bfloat16) == (2, 2, 1)
    assert module.stable_segments([MUON] * 8, bfloat16) == (2, 1, 1, 1, 2, 1)
    assert module.stable_segments(DION, bfloat16) == (1, 1, 2, 1)
    assert module.stable_segments([MUON] * 5, float64)[0] > 2


def test_multiplications():
    m, n = 512, 2048
    standard = 5 * (m * m * n / 2 + m**3 / 2 + m * m * n)
    assert module.multiplications(m, n, (1,) * 5) == standard
    # x x^T and q x; two polynomials, two products for r and one for q.
    assert module.multiplications(m, n, (2,)) == 1.5 * m * m * n + 2.5 * m**3
    assert module.multiplications(m, m, (2,)) == module.multiplications(m, m, (1, 1))


def problems(f, *shapes, dtype=jnp.float32):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return [call.problem for call in jax_tcgemm.explain(f, *args, platform="cuda")]


@pytest.mark.parametrize("shape", [(512, 512), (384, 1024), (2, 1024, 384)])
def test_products_of_small_matrices_are_symmetric(shape):
    found = problems(jax_tcgemm.newton_schulz, shape)
    small, large = min(shape[-2:]), max(shape[-2:])
    if small == large:  # the standard form
        assert [x.symmetric for x in found] == [True, True, False] * 5
        return
    together = [True] * 6 + [False]
    assert [x.symmetric for x in found] == together * 2 + [True, True, False]
    for x in found:
        assert (x.m == x.n == small) == x.symmetric
        assert {x.m, x.n, x.k} <= {small, large}


def test_small_matrices_are_not():
    assert not any(x.symmetric for x in problems(jax_tcgemm.newton_schulz, (128, 160)))


@pytest.mark.parametrize("form", FORMS)
def test_transformations(form):
    g = draw(3, 12, 20)

    def f(g):
        return jax_tcgemm.newton_schulz(g, dtype=jnp.float32, form=form, precision="highest")

    expected = exact(g)
    assert error(jax.jit(f)(g), expected) < 1e-4
    assert error(jax.vmap(f)(g), expected) < 1e-4
    got = jax.vmap(f, 1, 1)(jnp.swapaxes(g, 0, 1))
    assert error(jnp.swapaxes(got, 0, 1), expected) < 1e-4

    def reference(g):
        x = g / (jnp.linalg.norm(g, axis=(-2, -1), keepdims=True) + 1e-8)
        for _ in range(5):
            a, b, c = MUON
            r = jnp.matmul(x, x.mT, precision="highest")
            q = b * r + c * jnp.matmul(r, r, precision="highest")
            x = a * x + jnp.matmul(q, x, precision="highest")
        return x

    w = draw(3, 12, 20, seed=1)
    got, expected = (jax.grad(lambda g, h=h: jnp.sum(w * h(g)))(g) for h in (f, reference))
    np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
    got, expected = (jax.jvp(h, (g,), (w,))[1] for h in (f, reference))
    np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_are_no_symmetric_products(form):
    def f(g):
        return jax_tcgemm.newton_schulz(g, steps=2, form=form)

    forward = problems(f, (512, 512))
    both = problems(jax.grad(lambda g: jnp.sum(jnp.sin(f(g)))), (512, 512))
    assert len(both) > len(forward)
    assert sum(x.symmetric for x in both) == sum(x.symmetric for x in forward)


def test_zero_and_eps():
    g = jnp.zeros((8, 16))
    np.testing.assert_array_equal(jax_tcgemm.newton_schulz(g), g)
    g = draw(8, 16)
    got = jax.jit(lambda g, eps: jax_tcgemm.newton_schulz(g, eps=eps, dtype=jnp.float32))(g, 5.0)
    assert error(got, exact(g, eps=5.0)) < 1e-4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"g": jnp.ones(3)}, "g must have two dimensions or more, got g.shape="),
        ({"g": "g"}, "g must be an array"),
        ({"g": jnp.ones((3, 4), int)}, "g must be of a real floating-point dtype"),
        ({"g": jnp.ones((3, 4), complex)}, "g must be of a real floating-point dtype"),
        ({"steps": 0}, "steps must be 1 or more"),
        ({"steps": 2.0}, "steps must be an int"),
        ({"coefficients": (1, 2)}, "coefficients must be three numbers"),
        ({"coefficients": ((1, 2, 3), (1, 2))}, "coefficients must be three numbers"),
        ({"coefficients": (MUON,) * 4}, "coefficients must be three numbers or as many"),
        ({"coefficients": None}, "coefficients must be"),
        ({"dtype": jnp.int8}, "dtype must be bfloat16"),
        ({"form": "quick"}, "form must be None"),
        ({"eps": "small"}, "eps must be"),
        ({"precision": "some"}, "precision must be"),
        ({"implementation": "magic"}, "implementation must be"),
    ],
)
def test_errors(given, says):
    with pytest.raises((TypeError, ValueError), match=f"^newton_schulz: {says}"):
        jax_tcgemm.newton_schulz(given.pop("g", jnp.ones((3, 4))), **given)


def test_traced_coefficients():
    with pytest.raises(TypeError, match="^newton_schulz: coefficients must be numbers"):
        jax.jit(lambda g, c: jax_tcgemm.newton_schulz(g, coefficients=c))(
            jnp.ones((3, 4)), jnp.ones(3)
        )


# --- scale_by_muon ------------------------------------------------------------------------------

PARAMS = {"wide": draw(12, 20), "tall": draw(20, 12, seed=1), "square": draw(16, 16, seed=2)}


def compare(ours, theirs, params, steps=3):
    """Both give the same updates and states for a few steps."""
    got, expected = ours.init(params), theirs.init(params)
    update = jax.jit(ours.update)
    for i in range(steps):
        keys = jax.random.split(jax.random.key(i), len(jax.tree.leaves(params)))
        keys = jax.tree.unflatten(jax.tree.structure(params), list(keys))
        gradients = jax.tree.map(lambda x, k: jax.random.normal(k, x.shape), params, keys)
        updates, got = update(gradients, got, params)
        reference, expected = theirs.update(gradients, expected, params)
        for pairs in ((updates, reference), (got, expected)):
            assert jax.tree.structure(pairs[0]) == jax.tree.structure(pairs[1])
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4), *pairs
            )


def axes(params):
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"ns_steps": 3, "beta": 0.8, "eps": 1e-3},
        {"ns_coeffs": DION},
        {"nesterov": False},
        {"adaptive": True},
        {"mu_dtype": jnp.float32},
    ],
    ids=lambda given: "-".join(given) or "defaults",
)
def test_muon_is_that_of_optax(given):
    given = {"weight_dimension_numbers": axes, **given}
    ours = jax_tcgemm.scale_by_muon(dtype=jnp.float32, **given)
    compare(ours, optax.contrib.scale_by_muon(**given), PARAMS)


def test_muon_of_dimension_numbers():
    params = {"heads": draw(8, 3, 5), "experts": draw(2, 12, 6), "last": draw(4, 5, 6)}
    of = optax.contrib.MuonDimensionNumbers
    given = {"heads": of(0, (1, 2)), "experts": of(1, 2), "last": of((2,), (-3,))}
    ours = jax_tcgemm.scale_by_muon(dtype=jnp.float32, weight_dimension_numbers=given)
    theirs = optax.contrib.scale_by_muon(weight_dimension_numbers=given)
    compare(ours, theirs, params)


def test_muon_in_a_chain_of_optax():
    """Inside of `optax.contrib.muon`, where biases are masked."""
    params = {**PARAMS, "bias": draw(7)}
    theirs = optax.contrib.muon(0.1)
    with pytest.MonkeyPatch.context() as patch:
        inside = optax.contrib.muon.__globals__
        patch.setitem(
            inside,
            "scale_by_muon",
            lambda **given: jax_tcgemm.scale_by_muon(dtype=jnp.float32, **given),
        )
        ours = optax.contrib.muon(0.1)
    compare(ours, theirs, params)


def test_muon_without_dimension_numbers():
    optimizer = jax_tcgemm.scale_by_muon()
    updates, _ = optimizer.update(PARAMS, optimizer.init(PARAMS))
    for name, update in updates.items():
        assert update.dtype == jnp.float32
        assert error(update, exact(PARAMS[name])) < 0.06


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"preconditioning": "aol"}, 'preconditioning must be "frobenius"'),
        ({"ns_coeffs": (1, 2)}, "ns_coeffs must be three numbers"),
        ({"ns_coeffs": (MUON,) * 3, "ns_steps": 2}, "ns_coeffs must be at most ns_steps=2"),
        ({"ns_coeffs": "dion"}, "ns_coeffs must be"),
        ({"ns_steps": 0}, "ns_steps must be 1 or more"),
    ],
)
def test_muon_errors(given, says):
    with pytest.raises((TypeError, ValueError), match=f"^scale_by_muon: {says}"):
        jax_tcgemm.scale_by_muon(**given)


def test_muon_refuses_what_is_no_matrix():
    optimizer = jax_tcgemm.scale_by_muon()
    for shape in ((3,), (2, 3, 4)):
        params = {"w": jnp.ones(shape)}
        with pytest.raises(ValueError, match=r"^scale_by_muon: parameters must be matrices"):
            optimizer.update(params, optimizer.init(params))
    given = optax.contrib.MuonDimensionNumbers(0, (0, 1))
    optimizer = jax_tcgemm.scale_by_muon(weight_dimension_numbers={"w": given})
    with pytest.raises(ValueError, match=r"^scale_by_muon: weight_dimension_numbers must have"):
        optimizer.update(params, optimizer.init(params))


def test_muon_without_optax(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(muon.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"^scale_by_muon: Optax .* must be installed"):
        jax_tcgemm.scale_by_muon()
