"""The language model of the examples on two GPUs, beside one."""

import functools
import importlib
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("mesh", ["data=2", "model=2"])
def test_losses_are_those_of_one_gpu(mesh, tmp_path, monkeypatch):
    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.syspath_prepend(EXAMPLES)
    train = functools.partial(
        importlib.import_module("train_gpt").train, console=Console(quiet=True)
    )
    record = train("toy", 30, dtype="bfloat16", out=tmp_path, mesh=mesh)
    one, several = record["trainings"].values()
    # bfloat16 sums in other orders, which training amplifies.
    np.testing.assert_allclose(several["losses"], one["losses"], rtol=0.02)
    assert several["losses"][-1] < several["losses"][0] - 1
    assert one["collectives"] == {}
    assert "all-reduce" in several["collectives"]
