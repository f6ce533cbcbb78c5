"""The example that trains a language model, at a size for CI."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

PATH = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_gpt", PATH)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PATH.parent)
        spec.loader.exec_module(module)
    return module


def test_trains_as_stock_flax_does(example, tmp_path, monkeypatch):
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", "host")  # the choice, whatever the processor
    record = example.train(
        "test", 12, True, "float32", tmp_path, Console(quiet=True), accelerate=True, fused_loss=True
    )
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any("at examples/train_gpt.py:" in why for why in record["accelerated"])
    names = ["jax_tcgemm", "stock Flax", "stock Flax, accelerated", "fused loss"]
    assert list(record["trainings"]) == names
    ours, stock, accelerated, fused = (t["losses"] for t in record["trainings"].values())
    # The same network from the same start: float32 roundings, which training amplifies.
    np.testing.assert_allclose(ours, stock, rtol=2e-3)
    np.testing.assert_allclose(accelerated, stock, rtol=2e-3)
    np.testing.assert_allclose(fused, stock, rtol=2e-3)
    # From guessing among 256 bytes, with logits of variance 1, which costs half a nat.
    assert ours[0] == pytest.approx(np.log(256) + 0.5, rel=0.2)
    assert ours[-1] < ours[0] - 0.5
    # The head and, in each block, qkv, out, up and down: forwards and both gradients. The embedding
    # has one gradient.
    assert len(record["products"]) == 3 * (1 + 2 * 4) + 2
    # A gate and what it multiplies are one product, forwards and backwards.
    shapes = [product.partition(" f32")[0] for product in record["products"]]
    assert [shapes.count(x) for x in ("64x192x32 NN", "32x192x64 TN", "64x32x192 NT")] == [2, 2, 2]
    # The same products and, in each block, the two of attention and their two gradients each.
    assert len(record["accelerated"]) == len(record["products"]) + 2 * 2 * 3


@pytest.mark.parametrize("recipe", ["current", "block128"])
def test_trains_in_8_bits(example, tmp_path, recipe):
    record = example.train("test", 30, False, "bfloat16", tmp_path, Console(quiet=True), fp8=recipe)
    wide, narrow = (np.array(t["losses"]) for t in record["trainings"].values())
    assert list(record["trainings"]) == ["jax_tcgemm", f"8 bits, {recipe}"]
    assert wide[-1] < wide[0] - 0.5
    # Another network from the first step on, whose losses are nearly the same.
    assert (narrow != wide).any()
    np.testing.assert_allclose(narrow[-10:].mean(), wide[-10:].mean(), rtol=0.02)


def test_trains_by_muon(example, tmp_path):
    record = example.train(
        "test",
        10,
        True,
        "float32",
        tmp_path,
        Console(quiet=True),
        accelerate=True,
        optimizer="muon",
    )
    ours, stock, accelerated = (t["losses"] for t in record["trainings"].values())
    np.testing.assert_allclose(ours, stock, rtol=5e-3)
    np.testing.assert_allclose(accelerated, stock, rtol=5e-3)
    assert ours[-1] < ours[0] - 0.3


def test_text_is_python_source(example):
    text = example.read_text(100_000)
    assert len(text) == 100_000
    assert b"import " in text.tobytes()
