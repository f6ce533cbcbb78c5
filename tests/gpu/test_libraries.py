"""Modules of Flax, Equinox and Haiku whose products run as ours on a GPU."""

import jax
import pytest
from library_modules import CASES, X, assert_same_values_and_gradients

import jax_tcgemm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_calls(name, monkeypatch):
    make, num_ours, _ = CASES[name]
    theirs, ours, parameters = make()
    assert_same_values_and_gradients(theirs, ours, parameters)
    # They are so small that XLA's own kernels are chosen.
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", "mma_sync")
    explained = jax_tcgemm.explain(ours, parameters, X)
    assert len(explained) == num_ours
    num_calls = sum(call.implementation != "xla" for call in explained)
    assert num_calls == num_ours
    compiled = jax.jit(ours).lower(parameters, X).compile().as_text()
    assert compiled.count('custom_call_target="tcgemm_gemm"') == num_calls
