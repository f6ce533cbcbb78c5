"""Epilogues through the custom call: csrc/epilogue, csrc/cpu/host_epilogue.cc, problem/epilogue.py.

The reference is JAX in float64 on the same rounded inputs.
"""

import dataclasses

import jax
import numpy as np
import pytest
from epilogue_call import FORMS, Fused, check_activation, check_limits, tolerance
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_tcgemm import selection
from jax_tcgemm.device import dense
from jax_tcgemm.problem.activations import ACTIVATIONS
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.function import Function, Result
from jax_tcgemm.problem.gemm import Operand
from jax_tcgemm.selection.tables import problem_key
from jax_tcgemm.system import modules

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def host(problem):
    return selection.select("test", problem, selection.target_device("cpu"), "host")


def check(case, rng):
    case.check(case.draw(rng), host(case.problem))


# --- the list of activations --------------------------------------------------------------------


def test_both_sides_have_the_same_activations():
    assert modules.cpu.activations() == list(ACTIVATIONS)


@pytest.mark.parametrize(
    ("types", "rtol", "atol"),
    [("f32", 4e-6, 1e-6), ("f64", 1e-13, 1e-13), ("bf16", 2**-8, 1e-6), ("f16", 2**-10, 1e-6)],
)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation_is_that_of_jax(name, types, rtol, atol):
    check_activation(host, name, types, rtol, atol)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_numbers_give_limits_and_nan_stays(name):
    check_limits(host, name, "f32")


# --- the epilogue -------------------------------------------------------------------------------


@pytest.mark.parametrize("types", ["bf16", "f16", "f32", "f64", "bf16 f32", "tf32"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, types, rng):
    layouts = rng.permutation(["NN", "NT", "TN", "TT"])
    shapes = [(1, 40, 33), (33, 1, 12), (40, 72, 64)]
    for layout, (m, n, k) in zip(layouts, shapes, strict=False):
        case = dataclasses.replace(FORMS[form], types=types, layout=str(layout), m=m, n=n, k=k)
        check(case, rng)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("form", FORMS)
def test_layouts(form, layout, rng):
    check(dataclasses.replace(FORMS[form], layout=layout, m=21, n=35, k=19), rng)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(700, 90, 30), (40, 1100, 20), (3, 9, 0), (1, 5000, 8)], ids=str)
def test_blocks_and_no_k(form, shape, rng):
    m, n, k = shape
    check(dataclasses.replace(FORMS[form], m=m, n=n, k=k), rng)


@pytest.mark.parametrize("form", FORMS)
def test_batches(form, rng):
    case = dataclasses.replace(FORMS[form], m=9, n=20, k=6, batch=(2, 3))
    check(case, rng)
    if case.bias != "none":
        check(dataclasses.replace(case, bias_per_batch=True), rng)


@pytest.mark.parametrize("form", ["gelu", "gated_all", "dgated_sums"])
def test_empty(form, rng):
    for m, n, batch in [(0, 3, (1, 1)), (3, 0, (1, 1)), (2, 3, (1, 0))]:
        case = dataclasses.replace(FORMS[form], m=m, n=n, k=4, batch=batch)
        check(case, rng)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.integers(1, 70)] * 3),
    st.sampled_from(["NN", "NT", "TN", "TT"]),
    st.sampled_from(list(ACTIVATIONS)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["none", "n"]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_any_combination(shape, layout, activation, derivative, gated, bias, sums, seed):
    m, n, k = shape
    case = Fused(
        m=m,
        n=n,
        k=k,
        layout=layout,
        activation=activation,
        derivative=derivative,
        gated=gated,
        bias=bias,
        aux_out=not derivative,
        column_sums=sums,
    )
    with jax.enable_x64(True):
        check(case, np.random.default_rng(seed))


def test_sums_do_not_depend_on_the_run(rng):
    case = Fused(activation="silu", derivative=True, column_sums=True, m=700, n=600, k=20)
    arrays = case.draw(rng)
    runs = [case.run(arrays, host(case.problem)) for _ in range(3)]
    for run in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, run, runs[0])


# --- what is refused ----------------------------------------------------------------------------

BASE = Fused(m=4, n=6, k=8, types="f32")


def with_epilogue(**changes):
    return dataclasses.replace(BASE.problem, epilogue=Epilogue(**changes))


@pytest.mark.parametrize(
    ("epilogue", "message"),
    [
        ({"activation": "nosuch"}, "activation must be none, .* or leaky_relu, got nosuch"),
        ({"bias": "k"}, "bias must be none, n or m, got k"),
        ({"bias": "n", "bias_dtype": "bf16"}, "bias must have the dtype of d or f32, got bf16"),
        (
            {"bias": "n", "bias_dtype": "f32", "bias_batch_stride": -1},
            "bias_batch_stride must not be negative, got -1",
        ),
        ({"gated": True, "bias": "m", "bias_dtype": "f32"}, "of a gated product must be n, got m"),
        ({"up_offset": 3, "aux_out": True}, "up_offset must be 0 unless gated and no derivative"),
        ({"gated": True, "up_offset": -3}, "up_offset must not be negative, got -3"),
        ({"derivative": True, "aux_out": True}, "aux_out must be false in a derivative"),
    ],
)
def test_contradictions_are_refused(epilogue, message):
    problem = with_epilogue(**epilogue)
    with pytest.raises(ValueError, match=message):
        modules.cpu.reject("host", "auto", problem.query(), selection.Device("cpu").query())


def test_integers_have_no_epilogue():
    problem = dataclasses.replace(
        with_epilogue(activation="relu"),
        a=Operand("s8", False, 8),
        b=Operand("s8", False, 6),
        out_dtype="s32",
        compute="s32",
    )
    with pytest.raises(ValueError, match="must be f16, bf16, f32 or f64, got s32"):
        modules.cpu.reject("host", "auto", problem.query(), selection.Device("cpu").query())


def test_the_handler_checks_the_operands():
    a, b = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)
    good = {"bias": np.ones(6, np.float32), "aux_in": np.ones((4, 6), np.float32)}
    problem = with_epilogue(activation="relu", derivative=True, bias="n", bias_dtype="f32")
    choice = host(problem)
    assert dense.local_gemm(problem, a, b, **good, choice=choice).shape == (1, 4, 6)
    for changes, message in [
        ({"bias": np.ones(5, np.float32)}, "bias must hold at least 6 elements, got 5"),
        ({"aux_in": np.ones((4, 5), np.float32)}, "aux_in must hold at least 24 elements, got 20"),
        ({"aux_in": np.ones((4, 6), np.float64)}, "aux_in must have the dtype f32"),
        ({"bias": np.ones(6, np.float16)}, "bias must have the dtype of d or f32, got f16"),
    ]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*{message}"):
            dense.local_gemm(problem, a, b, **good | changes, in_place=False, choice=choice)
    gated = with_epilogue(gated=True, up_offset=2**62)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*b must hold at least"):
        dense.local_gemm(gated, a, b, choice=choice)


def test_missing_and_needless_operands():
    a, b = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)
    choice = host(BASE.problem)
    for problem, operands, message in [
        (with_epilogue(bias="n", bias_dtype="f32"), {}, "bias must be given"),
        (BASE.problem, {"bias": a}, "bias must not be given"),
        (with_epilogue(gated=True), {}, "b_up must be given"),
        (with_epilogue(gated=True, up_offset=48), {"b_up": b}, "b_up must not be given"),
        (with_epilogue(derivative=True), {}, "aux_in must be given"),
    ]:
        with pytest.raises(ValueError, match=f"local_gemm: {message}"):
            dense.local_gemm(problem, a, b, **operands, choice=choice)


# --- the description ----------------------------------------------------------------------------


def test_work_and_traffic():
    def problem(**epilogue):
        return dataclasses.replace(BASE.problem, epilogue=Epilogue(**epilogue))

    bare, d = problem(), 4 * 6 * 4
    assert problem(gated=True).flops == 2 * bare.flops
    assert problem(gated=True, derivative=True).flops == bare.flops
    assert problem(activation="silu", aux_out=True).bytes == bare.bytes + d
    assert problem(gated=True, aux_out=True).bytes == bare.bytes + 2 * d + bare.b_bytes
    assert problem(gated=True, derivative=True).bytes == bare.bytes + d + 2 * d


def test_every_field_is_in_the_key():
    values = {
        "activation": "silu",
        "derivative": True,
        "gated": True,
        "up_offset": 7,
        "bias": "n",
        "bias_dtype": "f32",
        "bias_batch_stride": 7,
        "aux_out": True,
        "column_sums": True,
        "function": Function("f", "", (), (), (0,), (Result(np.dtype(np.float32)),), work=1),
    }
    assert set(values) == {field.name for field in dataclasses.fields(Epilogue)}
    full = Epilogue(**values)
    keys = {problem_key(with_epilogue(**values))}
    for name in values:
        changed = dataclasses.replace(full, **{name: getattr(Epilogue(), name)})
        keys.add(problem_key(dataclasses.replace(BASE.problem, epilogue=changed)))
    assert len(keys) == len(values) + 1


def test_tolerances_would_catch_a_missing_bias(rng):
    """The comparison itself: a result without its bias is outside the tolerance."""
    case = dataclasses.replace(FORMS["gelu"], m=20, n=20, k=30, types="bf16")
    arrays = case.draw(rng)
    expected = case.expected(arrays)[0]
    wrong = dataclasses.replace(case, bias="none")
    got = wrong.run({k: v for k, v in arrays.items() if k != "bias"}, host(wrong.problem))[0]
    assert (np.abs(got - expected) > tolerance(case, arrays)[0]).any()
