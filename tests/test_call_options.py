"""Options of a call: what derivatives and calls on its behalf inherit, and how they are printed."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_tcgemm
from jax_tcgemm.passes.rewriting import options_of
from jax_tcgemm.problem.call_options import (
    CallOptions,
    LossKeepsLogits,
    Provenance,
    RoundingsRemoved,
)

FORCED = CallOptions("matmul", "host", "auto")
INVARIANT = CallOptions("linear", invariant_rows=64)
X, W = jnp.ones((6, 8), jnp.bfloat16), jnp.ones((8, 16), jnp.bfloat16)


def options_in(function, *args):
    """The options of all calls in a function's jaxpr."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    return [own for own in map(options_of, eqns) if own is not None]


def test_is_unconstrained():
    assert CallOptions("matmul").is_unconstrained
    assert not FORCED.is_unconstrained
    assert not INVARIANT.is_unconstrained


def test_calls_on_behalf_of_another_ask_for_nothing_else():
    own = CallOptions("linear", "wgmma", "64x64x64_c1x1x1_pp", 0, Provenance.ACCELERATED)
    assert own.selecting() == CallOptions("linear", provenance=Provenance.ACCELERATED)
    assert own.selecting("xla").implementation == "xla"
    assert INVARIANT.selecting() == CallOptions("linear")
    assert FORCED.of_step() == CallOptions("matmul")
    assert CallOptions("matmul", "xla", "default").of_step() == CallOptions("matmul", "xla")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (CallOptions("matmul"), "matmul"),
        (FORCED, "matmul/host/auto"),
        (INVARIANT, "linear/invariant_rows=64"),
        (
            CallOptions("accelerate", provenance=Provenance.ACCELERATED)
            .reporting(LossKeepsLogits("it has no labels"))
            .reporting(RoundingsRemoved(2)),
            "accelerate/accelerated/no loss without logits: it has no labels/2 roundings left out",
        ),
    ],
)
def test_jaxprs_print_what_differs_from_the_defaults(options, text):
    assert repr(options) == text


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({"implementation": "host", "config": "auto"}, CallOptions("linear", "host")),
        ({"batch_invariant": 64}, INVARIANT),
    ],
    ids=["forced", "batch_invariant"],
)
@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
def test_derivatives_inherit_all_but_the_config(activation, how, options):
    f = functools.partial(jax_tcgemm.linear, activation=activation, **how)
    forward, *others = options_in(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)), X, W)
    assert forward.config == how.get("config")
    assert forward.without_config() == options
    assert len(others) >= 2
    assert set(others) == {options}


@pytest.mark.parametrize(
    ("block", "provenance"),
    [((1, 8), Provenance.CALLED), ((1, 4), Provenance.DEQUANTIZED_BLOCKS)],
    ids=["rows", "blocks"],
)
def test_products_of_dequantized_operands_say_so(block, provenance):
    """In the gradients, which multiply what is dequantized by its block scales."""
    x, w = (jax_tcgemm.quantize(y, block=block) for y in (X, W.T))

    def loss(x_scale, w_scale):
        return jax_tcgemm.scaled_matmul(
            x.qvalue, w.qvalue, x_scale, w_scale, lhs_block=block, rhs_block=block
        ).sum()

    found = options_in(jax.grad(loss, (0, 1)), x.scale, w.scale)
    assert {own.function for own in found} == {"scaled_matmul"}
    assert provenance in {own.provenance for own in found}
