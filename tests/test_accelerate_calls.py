"""What of an accelerated program runs as one call, and what `explain` says of it."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from accelerated import K, M, N
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.selection import tables

# A program that is not rewritten is a warning.
pytestmark = pytest.mark.filterwarnings("error:accelerate:RuntimeWarning")


@pytest.fixture
def modelled(fake_cuda):
    """An H200 whose configs the cost model knows."""
    names = [
        "128x256x64_c1x1x1_co",
        "128x256x64_c2x1x1_co",
        "128x128x64_c1x2x1_pp",
        "64x64x64_c1x1x1_pp",
    ]
    fake_cuda.implementations = lambda: {"wgmma": names, "cublaslt": ["heuristic0"]}
    fake_cuda.rejects["cublaslt"] = "has no functions"


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def biased(x, w, bias):
    return jnp.sin(x @ w + bias)


BIASED = struct(4096, 1024), struct(1024, 4096), struct(4096)


@pytest.fixture(params=["a loop that takes long", "a loop that takes no time"])
def gains(request, modelled, monkeypatch):
    """Whether one call takes less time than two."""
    gains = request.param == "a loop that takes long"
    monkeypatch.setattr(selection, "loop_us", lambda *_, **__: 1000.0 if gains else 0.0)
    return gains


TIMES = r"([\d.]+) us for the product and ([\d.]+) us for its function"


def test_one_call_where_that_should_gain(gains):
    (call,) = jax_tcgemm.explain(jax_tcgemm.accelerate(biased), *BIASED, platform="cuda")
    assert call.implementation == ("wgmma" if gains else "xla")
    assert call.why.startswith("unfused: ") == (not gains)
    fused = float(re.search(r"the cost model predicts ([\d.]+) us", call.why)[1])
    product, loop = map(float, re.search(TIMES, call.why).groups())
    assert (fused < product + loop) == gains
    # The product that runs alone is rounded by itself, as the program has it.
    assert "bf16->bf16" in str(call.problem)


def test_predictions_are_of_the_modules_that_there_are(fake_cuda):
    def predicted(config):
        fake_cuda.implementations = lambda: {"wgmma": [config], "cublaslt": ["heuristic0"]}
        fake_cuda.rejects["cublaslt"] = "is not asked"
        selection.forget()
        (call,) = jax_tcgemm.explain(jax_tcgemm.accelerate(biased), *BIASED, platform="cuda")
        return float(re.search(TIMES, call.why)[1])

    assert predicted("64x64x64_c1x1x1_pp") > 1.5 * predicted("128x256x64_c2x1x1_co")


def test_what_xla_takes_for_the_rest(modelled):
    """It reads the product and the bias and writes the result, 32 MiB each, at 4.43 TB/s."""
    (call,) = jax_tcgemm.explain(
        jax_tcgemm.accelerate(lambda x, w, bias: x @ w + bias), *BIASED, platform="cuda"
    )
    _, loop = map(float, re.search(TIMES, call.why).groups())
    assert loop == pytest.approx(2.8 + 2 * 4096**2 * 2 / 4.43e6, rel=0.01)


def test_the_same_rule_for_an_epilogue_of_ones_own(gains, monkeypatch):
    def own(x, w, bias, **how):
        return jax_tcgemm.matmul(
            x, w, epilogue=lambda acc, b: jnp.sin(acc + b), epilogue_operands=(bias,), **how
        )

    (call,) = jax_tcgemm.explain(own, *BIASED, platform="cuda")
    assert call.why.startswith("unfused: ") == (not gains)
    forced = functools.partial(own, implementation="wgmma")
    (call,) = jax_tcgemm.explain(forced, *BIASED, platform="cuda")
    assert "unfused" not in call.why
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", "wgmma")
    (call,) = jax_tcgemm.explain(own, *BIASED, platform="cuda")
    assert "unfused" not in call.why


def test_what_is_lowered_is_what_is_explained(gains):
    accelerated = jax.jit(jax_tcgemm.accelerate(biased))
    text = accelerated.trace(*BIASED).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @tcgemm_gemm.*|stablehlo.dot_general.*", text)
    assert ("stablehlo.sine" in text) == (not gains)
    (call,) = calls
    assert call.startswith("custom_call") == gains
    # It stores what the program does: no float32 product is written for it.
    assert "tensor<4096x4096xbf16>" in call
    assert "xf32>" not in call


def test_a_product_stays_xlas_where_nothing_is_known_to_gain(modelled, monkeypatch):
    def choice(*operands):
        product = jax_tcgemm.accelerate(lambda x, w: x @ w)
        (call,) = jax_tcgemm.explain(product, *operands, platform="cuda")
        return call

    aligned, odd = (
        (struct(4096, 1000), struct(1000, 4096)),
        (struct(4096, 1001), struct(1001, 4096)),
    )
    stays = choice(*aligned)
    assert (stays.implementation, stays.why.partition(", which")[0]) == (
        "xla",
        "nothing is known to run it faster than XLA's own product",
    )
    assert choice(*odd).implementation == "wgmma"
    entry = tables.Entry("wgmma", "128x256x64_c2x1x1_co", 100.0, "0.1.0", abi=1)
    monkeypatch.setattr(tables, "lookup", lambda *_: iter([(entry, "a table")]))
    selection.forget()
    assert "measured, 100 us (a table)" in choice(*aligned).why
    monkeypatch.setattr(tables, "lookup", lambda *_: iter([(entry, "shipped table x.json")]))
    selection.forget()
    assert choice(*aligned).implementation == "xla"


def test_explain_names_what_stops_an_epilogue():
    def f(x, w):
        return jax.nn.softmax(x @ w) @ w.T

    report = jax_tcgemm.explain(jax_tcgemm.accelerate(f), normal(M, K), normal(K, N))
    assert [bool(re.search(r"no epilogue: sub\(.*test_accelerate", c.why)) for c in report] == [
        True,
        False,
    ]
    assert "no epilogue" not in report[1].why  # nothing follows
    wide = jax_tcgemm.accelerate(lambda x, w: jnp.sin(jnp.sin(x @ w)), wide=True)
    (call,) = jax_tcgemm.explain(wide, *(normal(M, M, dtype="bfloat16"),) * 2)
    assert call.why.endswith("; 2 roundings left out")
