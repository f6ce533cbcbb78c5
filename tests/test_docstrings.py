"""The examples in the docstrings run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

MODULES = (
    "blas.level1",
    "blas.level2",
    "blas.level3",
    "inspect.explain",
    "inspect.fragments",
    "checkpoint_policies",
    "losses.cross_entropy",
    "losses.top_k",
    "products.collective",
    "products.ragged.combine_rows",
    "products.dot_general",
    "products.gram",
    "products.linear",
    "products.matmul",
    "products.mlp",
    "products.muon",
    "products.newton_schulz",
    "products.patch",
    "products.ragged.gated_ragged_linear",
    "products.ragged.ragged_dot",
    "products.scaled_matmul",
    "problem.operands.quantized",
    "quantization.checkpoints",
    "quantization.fp8_dot_general",
    "quantization.fp8_mlp",
    "quantization.pack",
    "quantization.quantize",
    "system.switches",
    "tensor.contract",
    "tensor.einsum",
    "tensor.elementwise",
    "tensor.reduce",
    "tuning.autotune",
)


@pytest.mark.all_cases
@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failed, attempted = doctest.testmod(importlib.import_module(f"jax_tcgemm.{name}"))
    assert attempted > 0
    assert failed == 0


def test_headings_are_those_that_the_reference_knows():
    """Under `Example:` it would show the prompts as quotations."""
    for path in (Path(__file__).resolve().parents[1] / "jax_tcgemm").rglob("*.py"):
        assert not re.search(r"^ *Example:$", path.read_text("utf-8"), re.MULTILINE), path
