"""tune_on_first_use: what no table knows is measured once, when it is lowered, and kept."""

import concurrent.futures
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.selection import tables
from jax_tcgemm.tuning import first_use, measuring

HOW = "measured when it was first used"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, no tables from other tests, and nothing asked for by a call."""
    monkeypatch.setenv("TCGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(first_use, "_enabled", None)
    monkeypatch.setattr(first_use, "_failed", set())
    tables.reset()
    yield tmp_path / "cache"
    tables.reset()
    jax.clear_caches()


@pytest.fixture
def measured(monkeypatch):
    """Makes the last contender win by a fake timer; gives what was asked for, and where."""
    found = []

    def measure(problem, names, budget_s, quiet):
        assert not isinstance(jnp.zeros(()), jax.core.Tracer)
        found.append((problem, names, budget_s, threading.current_thread()))
        return [measuring.Measurement(*name, 10.0 + i) for i, name in enumerate(reversed(names))]

    monkeypatch.setattr(first_use, "measure", measure)
    monkeypatch.setattr(first_use, "start_up", lambda device: None)
    return found


def product(m=24):
    """A new function each time: JAX knows no program of it."""
    x, w = normal(m, 40), normal(40, 56, seed=1)
    y = jax.jit(lambda x, w: jax_tcgemm.matmul(x, w))(x, w)
    np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(w), rtol=1e-4, atol=1e-4)


def why(m=24):
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((m, 40), (40, 56)))
    return jax_tcgemm.explain(jax_tcgemm.matmul, x, w)[0].why


def test_nothing_is_measured_unless_it_is_asked_for(measured, monkeypatch):
    product()
    monkeypatch.setenv("TCGEMM_TUNE", "0")
    product()
    monkeypatch.setenv("TCGEMM_TUNE", "1")
    jax_tcgemm.tune_on_first_use(False)
    product()
    assert not measured


@pytest.mark.parametrize("by", ["call", "variable"])
def test_a_product_is_measured_once_and_kept(by, measured, cache, monkeypatch):
    if by == "call":
        jax_tcgemm.tune_on_first_use()
    else:
        monkeypatch.setenv("TCGEMM_TUNE", "1")
    before = why()
    assert not measured  # explain runs nothing
    assert "measured" not in before
    product()
    product()
    ((problem, names, budget_s, thread),) = measured
    assert (problem.m, problem.n, problem.k) == (24, 56, 40)
    assert ("xla", "default") in names
    assert ("host", "auto") in names
    assert budget_s == 2
    assert thread is not threading.current_thread()
    assert why() == f"measured, 10 us ({HOW})"
    product(25)
    assert len(measured) == 2
    (path,) = cache.glob("*.json")
    assert len(tables.read_table(path).entries) == 2


def test_a_later_process_reads_the_cache(measured, cache):
    jax_tcgemm.tune_on_first_use()
    product()
    tables.reset()
    jax.clear_caches()
    product()
    assert len(measured) == 1
    assert why() == f"measured, 10 us (user cache {next(cache.glob('*.json'))})"


def test_derivatives_and_layers(measured):
    jax_tcgemm.tune_on_first_use()
    x, w = normal(24, 40), normal(40, 56, seed=1)
    jax.jit(jax.grad(lambda x, w: jax_tcgemm.matmul(x, w).sum(), (0, 1)))(x, w)
    assert sorted(problem.layout for problem, *_ in measured) == ["NT", "TN"]
    jax.jit(lambda x, w: jax_tcgemm.linear(x, w, jnp.ones(56), activation="relu"))(x, w)
    # On a CPU XLA applies the activation.
    assert (len(measured), measured[-1][0].layout) == (3, "NN")


def test_what_is_not_measured(measured):
    """Names, rows by themselves, what autotune collects, empty products, programs for elsewhere."""
    jax_tcgemm.tune_on_first_use()
    x, w = normal(24, 40), normal(40, 56, seed=1)
    jax.jit(lambda x, w: jax_tcgemm.matmul(x, w, implementation="host"))(x, w)
    jax.jit(lambda x, w: jax_tcgemm.matmul(x, w, batch_invariant=True))(x, w)
    jax.jit(lambda x, w: jax_tcgemm.matmul(x[:0], w))(x, w)
    jax.jit(jax_tcgemm.matmul).trace(x, w).lower(lowering_platforms=("cuda",))
    with selection.collect():
        jax.jit(lambda x, w: jax_tcgemm.matmul(x, w))(x, w)
    assert not measured


def test_several_processes_choose_alike(measured, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    jax_tcgemm.tune_on_first_use()
    product()
    assert not measured


def test_a_failure_is_told_once(measured, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(first_use, "measure", fails)
    jax_tcgemm.tune_on_first_use()
    with pytest.warns(UserWarning, match="24x56x40 NN .* could not be measured .*: out of memory"):
        product()
    with warnings.catch_warnings(action="error"):
        product()
    assert "measured" not in why()


@pytest.mark.parametrize("apps", ["1", "1\n2", None])
def test_a_gpu_with_other_work_is_left_alone(apps, monkeypatch):
    def run(command, **kwargs):
        assert command[-2:] == ["-i", "3"]
        if apps is None:
            raise FileNotFoundError
        return type("Done", (), {"stdout": apps})

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(first_use.subprocess, "run", run)
    assert first_use._is_idle() == (apps != "1\n2")


def test_kernels_that_are_not_compiled_do_not_take_part(measured, monkeypatch):
    monkeypatch.setattr(
        first_use, "kernels_of", lambda p, name, config: [config] if config == "portable" else []
    )
    monkeypatch.setattr(first_use, "is_compiled", lambda instance: instance != "portable")
    jax_tcgemm.tune_on_first_use()
    product()
    ((_, names, *_),) = measured
    assert ("host", "portable") not in names
    assert len(names) >= 2


def test_contexts_of_the_program_do_not_reach_the_measurement(measured, monkeypatch):
    """Neither a mesh nor a default precision: they are of the thread that lowers."""
    seen = []
    fake = first_use.measure

    def measure(*args, **kwargs):
        seen.append(
            (jax.config.jax_default_matmul_precision, jax.sharding.get_abstract_mesh().empty)
        )
        return fake(*args, **kwargs)

    monkeypatch.setattr(first_use, "measure", measure)
    jax_tcgemm.tune_on_first_use()
    mesh = jax.make_mesh((1,), ("x",))
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        product()
    assert seen == [(None, True)]


def test_several_threads_measure_one_after_the_other(measured):
    jax_tcgemm.tune_on_first_use()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(product, range(24, 28)))
    assert sorted(problem.m for problem, *_ in measured) == [24, 25, 26, 27]
    assert len({thread for *_, thread in measured}) == 1


def test_measured_for_real(cache):
    jax_tcgemm.tune_on_first_use()
    product(48)
    assert why(48).endswith(f"us ({HOW})")
    (entry,) = tables.read_table(next(cache.glob("*.json"))).entries.values()
    assert entry.us > 0


def test_refusals():
    with pytest.raises(TypeError, match="tune_on_first_use: enabled must be True or False"):
        jax_tcgemm.tune_on_first_use("always")
