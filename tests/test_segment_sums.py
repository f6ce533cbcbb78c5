"""Sums by index that XLA adds in a fixed order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_tcgemm.device.segment_sums import segment_sums

jitted = jax.jit(segment_sums, static_argnums=2)


def reference(rows, indices, num_sums):
    out = np.zeros((num_sums, rows.shape[1]))
    is_any = (indices >= 0) & (indices < num_sums)
    np.add.at(out, indices[is_any], np.asarray(rows, np.float64)[is_any])
    return out


@given(
    st.sampled_from([(100, 3), (20, 40), (0, 4), (5, 0)]),
    st.sampled_from([0.01, 0.3, 1.2]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_values(extents, spread, seed):
    """None, one and many rows with the same index, some out of range."""
    (m, num_sums), rng = extents, np.random.default_rng(seed)
    rows = rng.standard_normal((m, 5)).astype(np.float32)
    indices = np.floor(spread * num_sums * rng.uniform(-0.2, 1, m)).astype(np.int32)
    got = jitted(rows, indices, num_sums)
    np.testing.assert_allclose(got, reference(rows, indices, num_sums), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_sum(bad):
    rows, indices = np.ones((100, 3), np.float32), np.arange(100, dtype=np.int32) % 7
    rows[9] = bad
    got = np.asarray(jitted(rows, indices, 7))
    np.testing.assert_array_equal(got[[0, 1, 3, 4, 5, 6]], [[15] * 3] * 2 + [[14] * 3] * 4)
    assert not np.isfinite(got[2]).any()


def test_the_order_of_a_sum_follows_from_the_indices_alone():
    """Rows in between, which belong elsewhere, change no bit of it."""
    rows = np.random.default_rng(0).standard_normal((100, 6)).astype(np.float32)
    indices = np.arange(100, dtype=np.int32) % 2
    wider, more = np.full((150, 6), 7, np.float32), np.full(150, 2, np.int32)
    places = np.sort(np.random.default_rng(1).permutation(150)[:100])
    wider[places], more[places] = rows, indices
    np.testing.assert_array_equal(jitted(wider, more, 3)[:2], jitted(rows, indices, 3)[:2])


def test_compiles_to_no_scatter_of_rows():
    """Only counts, and sums that have a place of their own each, are scattered."""
    text = jitted.lower(np.ones((100, 5), np.float32), jnp.zeros(100, jnp.int32), 3).as_text()
    scatters = [part.split("}>")[0] for part in text.split("stablehlo.scatter")[1:]]
    rows = [scatter for scatter in scatters if "update_window_dims = [1]" in scatter]
    assert rows
    assert all("unique_indices = true" in scatter for scatter in rows)
