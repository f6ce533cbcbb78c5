"""autotune on a GPU: device time of many configs, quickly, and the fastest is used."""

import jax
import jax.numpy as jnp
import pytest

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.bench import regret
from jax_tcgemm.selection import tables

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cache(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("TCGEMM_CACHE_DIR", str(tmp_path))
    tables.reset()
    yield tmp_path
    tables.reset()
    jax.clear_caches()


def test_the_fastest_is_used_from_then_on(cache):
    a = jax.ShapeDtypeStruct((384, 640), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((640, 896), jnp.bfloat16)
    result = jax_tcgemm.autotune(jax_tcgemm.matmul, a, b, budget_s=30.0, progress=False)
    (tuned,) = result
    assert len(tuned.measured) >= 5
    assert tuned.best.us <= tuned.measured[0].us * 1.02
    assert 1 < tuned.best.us < 100
    assert len(list(cache.glob("*.json"))) == 1
    (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, a, b)
    assert f"{call.implementation}/{call.config}" == tuned.best.name
    assert call.why.startswith("measured")
    jax_tcgemm.matmul(jnp.ones(a.shape, a.dtype), jnp.ones(b.shape, b.dtype)).block_until_ready()


def test_every_choice_for_a_random_problem_runs():
    draws = regret.random_problems(24, seed=1, scale=0.8)
    found = list(regret.measure(draws, selection.target_device("cuda"), budget_s=0.1))
    assert [outcome.draw for outcome in found] == draws
    for outcome in found:
        assert outcome.chosen in outcome.times, outcome.draw
        # Few, of functions that one kernel alone runs; as many as the budget allows.
        assert len(outcome.times) > 1
        assert all(1 < us < 1e5 for us, _ in outcome.times.values())
