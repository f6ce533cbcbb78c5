"""The example that serves weights of 4 bits, at a size for CI."""

import importlib.util
import sys
from pathlib import Path

import pytest
from rich.console import Console

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "serve_int4.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("serve_int4", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serve_int4", module)
    spec.loader.exec_module(module)
    return module


def test_both_weights_have_the_same_scores(example):
    record = example.serve("test", 3, 4, Console(quiet=True))
    assert record["difference"] < 2e-2
    assert record["int4"]["gigabytes"] < record["bfloat16"]["gigabytes"]
    assert record["int4"]["tokens_per_second"] > 0
