"""The example that trains a mixture of experts, at a size for CI."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # Where train_gpt is, as for a script that is run.
    monkeypatch.delitem(sys.modules, "train_gpt", raising=False)
    spec = importlib.util.spec_from_file_location("train_moe", EXAMPLES / "train_moe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_learns_and_spreads_tokens(example, tmp_path):
    record = example.train("test", 12, "float32", tmp_path, Console(quiet=True))
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert record["losses"][-1] < record["losses"][0] - 0.5
    shares = np.array(record["shares"])
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-5)
    assert shares.shape == (12, 2, 8)
    assert ((shares.mean(0) > 0).sum(-1) >= 5).all()
    # Both grouped products and both gradients of each, in two layers.
    grouped = [product for product in record["products"] if "groups" in product]
    assert len(grouped) == 2 * 6
    assert not any(": xla" in product for product in grouped)
