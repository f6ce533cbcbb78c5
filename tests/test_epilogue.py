"""What follows a product, as data: csrc/core/problem.h, problem/epilogue.py."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from epilogue_call import FORMS, Fused, tolerance

from jax_tcgemm import selection
from jax_tcgemm.primitives import epilogue_product
from jax_tcgemm.primitives.encodings.plain import Plain
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.function import Cost, Function, Result
from jax_tcgemm.problem.layers import scaling_of
from jax_tcgemm.selection.tables import problem_key
from jax_tcgemm.system import modules

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def unfused(case):
    """A case by plain products and XLA, with `pair` and all."""
    whole = case.product

    def run(operands):
        encoding = Plain(
            whole.product.dimension_numbers,
            whole.product.permutation,
            whole.product.result_dtype,
            num_rhs=whole.num_rhs,
            pair=whole.pair,
            precision="highest",
        )
        return epilogue_product.unfused(
            *operands,
            options=CallOptions("test"),
            encoding=encoding,
            function=whole.function,
            in_place=None,
            xla_dtype=None,
        )

    return jax.jit(run)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_unfused_is_what_is_expected(form, rng):
    case = dataclasses.replace(FORMS[form], types="f32", m=21, n=36, k=19)
    arrays = case.draw(rng)
    case.compare([np.asarray(x, np.float64) for x in unfused(case)(case.given(arrays))], arrays)


def test_tolerances_would_catch_a_missing_bias(rng):
    """The comparison itself: a result without its bias is outside the tolerance."""
    case = dataclasses.replace(FORMS["gelu"], m=20, n=20, k=30, types="f32")
    arrays = case.draw(rng)
    expected = case.expected(arrays)[0]
    (got,) = unfused(case)(case.given(arrays | {"bias": np.zeros((1, 20), np.float32)}))
    assert (np.abs(got - expected) > tolerance(case, arrays)[0]).any()


# --- what is refused ----------------------------------------------------------------------------

BASE = Fused(m=4, n=6, k=8, types="f32", activation="relu").problem


@pytest.mark.parametrize(
    ("epilogue", "message"),
    [
        ({"gated": True}, "a gated product must have a function"),
        ({"up_offset": 3}, "up_offset must be 0 unless gated, got 3"),
    ],
)
def test_contradictions_are_refused(epilogue, message):
    problem = dataclasses.replace(BASE, epilogue=Epilogue(**epilogue))
    with pytest.raises(ValueError, match=message):
        modules.cpu.reject("host", "auto", problem.query(), selection.Device("cpu").query())


def test_the_host_has_no_functions():
    reason = modules.cpu.reject("host", "auto", BASE.query(), selection.Device("cpu").query())
    assert reason == "it has no function"


# --- the description ----------------------------------------------------------------------------


def test_libraries_are_told_which_of_their_epilogues_it_is():
    libraries = {form: case.problem.function.library for form, case in FORMS.items()}
    known = {form: library for form, library in libraries.items() if library != "none"}
    assert known == {
        "bias": "bias",
        "gelu": "gelu_bias",
        "gelu_aux": "gelu_aux_bias",
        "gelu_bare": "gelu",
        "relu": "relu_bias",
        "dgelu": "dgelu",
    }


BF16, F32 = np.dtype("bfloat16"), np.dtype("float32")


@pytest.mark.parametrize(
    ("function", "residual", "expected"),
    [
        (lambda acc: acc, None, (1.0, None, F32)),
        (lambda acc: (acc * -0.5).astype(BF16), None, (-0.5, None, BF16)),
        (lambda acc, c: (2 * acc + c.astype(F32)).astype(BF16), BF16, (2.0, 0, BF16)),
        (lambda acc, c: c + acc, F32, (1.0, 0, F32)),
        (lambda acc, c: (acc + c).astype(BF16), F32, None),  # whose C is not rounded
        (lambda acc, c: acc.astype(BF16) + c, BF16, None),  # whose product is
        (lambda acc, c: acc + 2 * c, F32, None),
        (lambda acc, c: acc - c, F32, None),
        (lambda acc: acc + acc, None, None),
        (lambda acc: (acc, acc), None, None),
        (lambda acc: acc.astype(np.float64), None, None),
        (lambda acc: acc.astype(np.int32), None, None),
        (lambda acc: acc.sum(0), None, None),
        (lambda acc: acc.T, None, None),
    ],
)
def test_what_alpha_and_beta_are(function, residual, expected):
    acc = jax.ShapeDtypeStruct((4, 4), F32)
    operands = () if residual is None else (jax.ShapeDtypeStruct((4, 4), residual),)
    found = scaling_of(jax.make_jaxpr(function)(acc, *operands))
    assert (found and dataclasses.astuple(found)) == expected


def test_work_and_traffic():
    bare = dataclasses.replace(BASE, epilogue=Epilogue())
    d, shape = 4 * 6 * 4, {"m": 4, "n": 6, "k": 8, "types": "f32"}
    assert BASE.bytes == bare.bytes
    assert Fused(**shape, activation="silu", gated=True).problem.flops == 2 * bare.flops
    assert Fused(**shape, activation="silu", aux_out=True).problem.bytes == bare.bytes + d
    derivative = Fused(**shape, activation="silu", gated=True, derivative=True).problem
    assert derivative.flops == bare.flops
    assert derivative.d_shape == (1, 4, 2, 6)
    assert derivative.bytes == bare.bytes + 3 * d


def test_every_field_is_in_the_key():
    cost = Cost(1, 1, 1)
    function = functools.partial(
        Function, definitions="", reads=(), indices=(), order=(0,), cost=cost
    )
    results = (Result(np.dtype(np.float32)),)
    values = {"gated": True, "up_offset": 7, "function": function("f", results=results)}
    assert set(values) == {field.name for field in dataclasses.fields(Epilogue)}
    full = Epilogue(**values)
    keys = {problem_key(dataclasses.replace(BASE, epilogue=full))}
    for name in values:
        changed = dataclasses.replace(full, **{name: getattr(Epilogue(), name)})
        keys.add(problem_key(dataclasses.replace(BASE, epilogue=changed)))
    assert len(keys) == len(values) + 1
