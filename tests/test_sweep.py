"""Random problems beside XLA: what is drawn, that faults are found, and the command."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jax_tcgemm.bench import render, sweep
from jax_tcgemm.bench.random_problems import kinds as random_kinds
from jax_tcgemm.bench.random_problems.kinds import KINDS
from jax_tcgemm.command import cli


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Problems that a CPU computes in no time."""
    monkeypatch.setattr(random_kinds, "_MOST_FLOPS", 3e6)
    monkeypatch.setattr(random_kinds, "_MOST_BYTES", 1e6)


# Bounds of kinds whose least problems are larger than others'.
LARGER = {"losses": 3e7, "ragged": 3e7, "float8": 3e7, "int4 weights": 1e8, "dense": 1e7}


def drawn(kind, seed=0):
    random_kinds._MOST_FLOPS = LARGER.get(kind, 3e6)
    random_kinds._MOST_BYTES = 1e7
    with jax.enable_x64(True):
        (problem,) = random_kinds.random_problems(1, seed, [kind])
    return problem


def test_the_same_seed_draws_the_same_problems():
    kinds = ["odd sizes", "linear", "tiny batches"]
    with jax.enable_x64(True):
        first, again, other = (
            [x.text for x in random_kinds.random_problems(6, seed, kinds)] for seed in (1, 1, 2)
        )
        more = [x.text for x in random_kinds.random_problems(9, 1, kinds)]
    assert first == again == more[:6]
    assert first != other


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_measured_and_right(kind):
    (record,) = sweep.measure([drawn(kind)], limit_s=600)
    assert not sweep.is_wrong(record), record
    assert record["us"] > 0
    assert record["xla_us"] > 0
    assert 0 <= record["xla_error"] <= record["tolerance"]


@pytest.mark.parametrize("error", ["value", "shape", "raises"])
def test_faults_are_found(error):
    problem = drawn("odd sizes")

    def wrong(a, b):
        out = problem.ours(a, b)
        if error == "raises":
            raise ValueError("it cannot")
        return out[..., :1] if error == "shape" else out.at[0, 0].add(1000)

    (record,) = sweep.measure([dataclasses.replace(problem, ours=wrong)], limit_s=600)
    assert sweep.is_wrong(record)
    assert ("failure" in record) == (error != "value")


def test_what_is_slow():
    record = {"ratio": 0.9, "us": 11.0, "xla_us": 10.0}
    assert sweep.is_slow(record)
    assert not sweep.is_slow(record | {"ratio": 0.96})
    assert not sweep.is_slow(record | {"us": 1.2, "xla_us": 1.0})
    assert not sweep.is_slow({"failure": "it cannot"})


def test_quantiles():
    records = [{"sweep_kind": kind, "ratio": x} for kind, x in (("a", 1.0), ("a", 4.0), ("b", 2.0))]
    a, b, everything = sweep.quantiles(records)
    assert a[:2] == ("a", 2)
    np.testing.assert_allclose([a[2], b[2], everything[2]], 2.0)
    assert a[3][0] == 1.0
    assert everything[1] == 3


def test_references_are_computed_in_double_precision():
    x = sweep._on_host(jnp.ones((2, 2), jnp.bfloat16))
    assert x.dtype == np.float64
    assert sweep._on_host(jnp.ones(2, jnp.complex64)).dtype == np.complex128
    assert sweep._on_host(jnp.ones(2, jnp.int8)).dtype == np.int64


def test_the_command(tmp_path):
    out = tmp_path / "sweep.jsonl"
    command = [
        "bench",
        "sweep",
        "--problems",
        "2",
        "--seed",
        "3",
        "--kinds",
        "odd sizes,mixed dtypes",
    ]
    result = CliRunner().invoke(cli.app, [*command, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "2 problems of seed 3: 0 wrong" in result.output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["sweep_kind"] for r in records] == ["odd sizes", "mixed dtypes"]
    text = "\n\n".join(render._sweep_tables("a GPU", records))
    assert "2 random problems (seeds 3)" in text
    assert "| mixed dtypes | 1 |" in text
    refused = CliRunner().invoke(cli.app, ["bench", "sweep", "--kinds", "odd"])
    assert refused.exit_code != 0
    assert "kinds must be among" in refused.output


def test_the_chart(tmp_path):
    machine = {"device": "NVIDIA H100"}
    records = [
        {"sweep_kind": kind, "ratio": ratio, "machine": machine}
        for kind, ratio in (("a", 1.0), ("a", 4.0), ("b", 0.5))
    ]
    from jax_tcgemm.bench.plot import plot_sweep

    path = tmp_path / "sweep.png"
    plot_sweep(records, path, "what it shows")
    assert b"what it shows" in path.read_bytes()
