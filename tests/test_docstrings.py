"""The examples in the docstrings run."""

import doctest
import importlib
import sys

import pytest

MODULES = (
    "autotune",
    "blas.level1",
    "blas.level2",
    "blas.level3",
    "collective",
    "debug",
    "dot_general",
    "explain",
    "matmul",
    "patch",
    "ragged_dot",
    "tensor.contract",
    "tensor.einsum",
    "tensor.elementwise",
    "tensor.reduce",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    importlib.import_module("jax_tcgemm")
    # By its full name: in the package, `matmul` is the function.
    failed, attempted = doctest.testmod(sys.modules[f"jax_tcgemm.{name}"])
    assert attempted > 0
    assert failed == 0
