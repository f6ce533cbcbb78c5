"""The demo: both networks learn the same, and it says what ran."""

import builtins

import pytest
from rich.console import Console

from jax_tcgemm import info
from jax_tcgemm.command import demo


def run(num_steps, implementation=None):
    return demo.run_demo(num_steps, implementation, Console(quiet=True))


@pytest.mark.parametrize(
    "implementation",
    [None, *(e.name for e in info().implementations if e.available and e.platform == "cpu")],
    ids=str,
)
def test_reaches_the_accuracy_of_jnp(implementation):
    result = run(120, implementation)
    assert result.ours.test_accuracy > 0.9
    assert abs(result.ours.test_accuracy - result.jnp.test_accuracy) < 0.02
    assert result.ours.final_loss == pytest.approx(result.jnp.final_loss, rel=0.1)
    assert result.ours.step_us > 0


def test_every_product_forward_and_backward_is_ours():
    explanation = run(2, "xla").explanation
    assert {call.implementation for call in explanation} == {"xla"}
    # Three layers: a forward product and a weight gradient each, an input gradient for all but
    # the first.
    assert len(explanation) == 8
    assert (
        sorted(call.problem.layout for call in explanation) == ["NN"] * 3 + ["NT"] * 2 + ["TN"] * 3
    )


def test_says_which_extra_is_missing(monkeypatch):
    real = builtins.__import__

    def without_sklearn(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_sklearn)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax_tcgemm\[demo\]'"):
        demo.load_digits()


def test_refuses_too_few_steps():
    with pytest.raises(ValueError, match="steps must be at least 2, got steps=1"):
        demo.run_demo(1)
