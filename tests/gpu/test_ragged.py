"""Grouped products on a GPU: every implementation and config, exact on small integers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference

import jax_tcgemm
from jax_tcgemm.system import modules

pytestmark = pytest.mark.gpu


def configs():
    found = modules.cuda.ragged.implementations() if modules.cuda is not None else {}
    return [(name, config) for name, all_of_it in found.items() for config in all_of_it]


def integers(*shape, seed, dtype):
    """Small ones, which every dtype holds and every accumulator adds without rounding."""
    rng = np.random.default_rng(seed)
    return rng.integers(-2, 2, shape, endpoint=True).astype(jnp.dtype(dtype))


# Of ten groups: one program serves them all.
SIZES = {
    "mixed": [1, 0, 17, 64, 33, 129, 300, 2, 255, 0],
    "one group": [0, 801, 0, 0, 0, 0, 0, 0, 0, 0],
    "none": [0] * 10,
    "more than there are": [100, 0, 200] + [300] * 7,
}
M, K, N = 840, 136, 264
FORMS = {
    "rows": ((((1,), (1,)), ((), ())), (0,), (0,)),
    "transposed": ((((1,), (2,)), ((), ())), (0,), (0,)),
    "contraction": ((((0,), (0,)), ((), ())), (0,), ()),
}


@pytest.mark.parametrize(
    ("implementation", "config", "dtype"),
    [
        (*each, dtype)
        for each in configs()
        for dtype in ("bfloat16", "float16", "float32")
        if each[0] != "wgmma" or dtype != "float32"
    ],
)
def test_values_and_gradients(implementation, config, dtype):
    lhs = integers(M, K, seed=1, dtype=dtype)
    rhs = integers(10, K, N, seed=2, dtype=dtype)
    ct = integers(M, N, seed=3, dtype=dtype)
    flipped = np.ascontiguousarray(np.swapaxes(rhs, 1, 2))
    cases = {
        "rows": (lhs, rhs, reference.rows),
        "transposed": (lhs, flipped, lambda x, w, s: reference.rows(x, rhs, s)),
        "contraction": (lhs, ct, reference.contraction),
    }
    ran = 0
    for form, (x, y, expected) in cases.items():
        f = functools.partial(
            jax_tcgemm.ragged_dot_general,
            ragged_dot_dimension_numbers=jax.lax.RaggedDotDimensionNumbers(*FORMS[form]),
            preferred_element_type="float32",
            implementation=implementation,
            config=config,
        )
        try:
            compiled = jax.jit(f).lower(x, y, jnp.zeros(10, int)).compile()
        except ValueError as error:
            # A config of wgmma is for one form, or reads the matrices in one order only.
            if implementation != "wgmma" or not re.search("is of form|reads b as", str(error)):
                raise
            continue
        for sizes in SIZES.values():
            got = compiled(x, y, jnp.array(sizes))
            np.testing.assert_array_equal(got, expected(x, y, sizes))
            ran += 1
    assert ran


@pytest.mark.parametrize("implementation", ["wgmma", "mma_sync"])
def test_many_groups(implementation):
    sizes = np.random.default_rng(0).multinomial(700, np.full(512, 1 / 512))
    lhs = integers(M, 72, seed=1, dtype="bfloat16")
    rhs = integers(512, 72, 64, seed=2, dtype="bfloat16")
    got = jax_tcgemm.ragged_dot(
        lhs,
        rhs,
        jnp.array(sizes),
        preferred_element_type="float32",
        implementation=implementation,
    )
    np.testing.assert_array_equal(got, reference.rows(lhs, rhs, sizes))


def test_selection_runs_training_on_our_kernels(gpu):
    x, w = jnp.ones((64, 128), jnp.bfloat16), jnp.ones((4, 128, 256), jnp.bfloat16)
    sizes = jnp.array([10, 0, 30, 24])

    def loss(x, w):
        return jnp.sum(jax_tcgemm.ragged_dot(x, w, sizes).astype(jnp.float32) ** 2)

    calls = jax_tcgemm.explain(jax.grad(loss, (0, 1)), x, w, platform="cuda")
    expected = "wgmma" if modules.cuda_device()["compute_capability"] == 90 else "mma_sync"
    assert [call.implementation for call in calls] == [expected] * 3


@pytest.mark.parametrize("implementation", ["wgmma", "mma_sync"])
def test_nan_stays_in_its_group(implementation):
    sizes = [100, 0, 65, 200, 33]
    lhs, ct = (integers(400, 136, seed=i, dtype="bfloat16") for i in range(2))
    rhs = integers(5, 136, 136, seed=2, dtype="bfloat16")
    bad_lhs, bad_ct = lhs.copy(), ct.copy()
    bad_lhs[100:165], bad_ct[100:165] = np.nan, np.inf
    bad_lhs[398:], bad_ct[398:] = np.inf, np.nan

    @jax.jit
    def f(lhs, rhs, ct):
        run = functools.partial(
            jax_tcgemm.ragged_dot, group_sizes=jnp.array(sizes), implementation=implementation
        )
        out, vjp = jax.vjp(run, lhs, rhs)
        return out, *vjp(ct)

    (out, lhs_bar, rhs_bar), clean = f(bad_lhs, rhs, bad_ct), f(lhs, rhs, ct)
    others = np.r_[0:100, 165:400]
    for got, expected in ((out, clean[0]), (lhs_bar, clean[1])):
        np.testing.assert_array_equal(got[others], expected[others])
    for group in (0, 1, 3, 4):
        np.testing.assert_array_equal(rhs_bar[group], clean[2][group])
    np.testing.assert_array_equal(rhs_bar[1], 0)


@pytest.mark.parametrize("form", ["rows", "transposed", "fused"])
def test_every_width_of_a_tile(form):
    """As many tokens as the instruction has widths, and more; NaN in every other group."""
    lhs = integers(700, K, seed=1, dtype="bfloat16")
    rhs = integers(4, K, N, seed=2, dtype="bfloat16")
    flipped = jax.lax.RaggedDotDimensionNumbers(*FORMS["transposed"])
    f, weights = {
        "rows": (jax_tcgemm.ragged_dot, rhs),
        "transposed": (
            functools.partial(jax_tcgemm.ragged_dot_general, ragged_dot_dimension_numbers=flipped),
            np.ascontiguousarray(np.swapaxes(rhs, 1, 2)),
        ),
        "fused": (functools.partial(jax_tcgemm.ragged_dot, activation="relu"), rhs),
    }[form]
    f = jax.jit(functools.partial(f, preferred_element_type="float32", implementation="wgmma"))
    for rows in range(1, 522, 2):
        sizes = [7, rows, 5, 60]
        bad = np.full_like(lhs, np.nan)
        bad[7 : 7 + rows] = lhs[7 : 7 + rows]
        got = f(bad, weights, jnp.array(sizes))[7 : 7 + rows]
        want = reference.rows(lhs, rhs, sizes)[7 : 7 + rows]
        np.testing.assert_array_equal(got, np.maximum(want, 0) if form == "fused" else want)


def test_what_is_loaded_of_the_next_group_is_overwritten():
    """Every number of rows of the last k block; NaN in all groups but one, whatever comes after."""
    numbers = jax.lax.RaggedDotDimensionNumbers(*FORMS["contraction"])
    f = jax.jit(
        functools.partial(
            jax_tcgemm.ragged_dot_general,
            ragged_dot_dimension_numbers=numbers,
            preferred_element_type="float32",
            implementation="wgmma",
        )
    )
    lhs, ct = (integers(300, K if i else N, seed=i, dtype="bfloat16") for i in range(2))
    for rows in range(1, 131):
        sizes = [7, rows, 5, 0, 60]
        bad_lhs, bad_ct = np.full_like(lhs, np.nan), np.full_like(ct, np.inf)
        bad_lhs[7 : 7 + rows], bad_ct[7 : 7 + rows] = lhs[7 : 7 + rows], ct[7 : 7 + rows]
        got = f(bad_lhs, bad_ct, jnp.array(sizes))
        want = reference.contraction(lhs, ct, sizes)
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_array_equal(got[3], 0)


def test_one_program_and_its_graph_serve_any_sizes():
    """Eight calls, which XLA captures into a CUDA graph, with other sizes each time."""
    rhs = integers(6, 64, 64, seed=1, dtype="bfloat16")

    @jax.jit
    def f(lhs, sizes):
        out = [
            jax_tcgemm.ragged_dot(lhs, rhs, jnp.roll(sizes, i), implementation="wgmma")
            for i in range(8)
        ]
        return jnp.stack(out)

    rng = np.random.default_rng(0)
    for i in range(6):
        lhs = integers(300, 64, seed=i, dtype="bfloat16")
        sizes = rng.multinomial(290, rng.dirichlet(np.full(6, 0.5)))
        got = f(lhs, jnp.array(sizes))
        for shift in range(8):
            expected = reference.rows(lhs, rhs, np.roll(sizes, shift))
            np.testing.assert_array_equal(np.asarray(got[shift], np.float64), expected)
    assert f._cache_size() == 1
