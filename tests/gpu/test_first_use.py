"""tune_on_first_use on a GPU: measured while a program is lowered, kept, and right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_arrays import normal, widened

import jax_tcgemm
from jax_tcgemm.selection import tables
from jax_tcgemm.tuning import first_use

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TCGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(first_use, "_enabled", None)
    monkeypatch.setattr(first_use, "_is_idle", lambda: True)  # Tests run side by side.
    tables.reset()
    yield tmp_path / "cache"
    tables.reset()
    jax.clear_caches()


def test_a_program_is_measured_when_it_is_lowered(cache):
    x, w = normal(1234, 777, dtype="bfloat16"), normal(777, 1536, seed=1, dtype="bfloat16")
    jax_tcgemm.tune_on_first_use()

    def loss(x, w):
        return jnp.sum(jax_tcgemm.linear(x, w, activation="relu").astype(jnp.float32))

    y = jax.jit(jax_tcgemm.matmul)(x, w)
    exact = widened(x) @ widened(w)
    np.testing.assert_allclose(widened(y), exact, rtol=2e-2, atol=0.02 * abs(exact).max())
    jax.jit(jax.grad(loss, (0, 1)))(x, w)
    (path,) = cache.glob("*.json")
    assert len(tables.read_table(path).entries) >= 3
    (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, x, w)
    assert call.why.endswith("us (measured when it was first used)")


def test_programs_of_a_mesh_and_of_parts():
    x, w = normal(256, 512), normal(512, 256, seed=1)
    jax_tcgemm.tune_on_first_use()
    with jax.set_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices("cuda")[:1])):
        y = jax.jit(lambda x, w: jax_tcgemm.matmul(x, w, precision="BF16_BF16_F32_X6"))(x, w)
    np.testing.assert_allclose(y, widened(x) @ widened(w), rtol=1e-4, atol=1e-3)
