"""What the host implementation refuses: malformed calls, and problems it does not run."""

import jax
import numpy as np
import pytest
from host_call import DEVICE, ISAS, Call, query

from jax_tcgemm.system import modules

pytestmark = pytest.mark.usefixtures("x64")

HUGE = 2**62

MALFORMED = {
    "abi": ({"abi": 0}, "ABI version 0"),
    "implementation": ({"implementation": "nosuch"}, "implementation nosuch is not part of"),
    "config": ({"config": "nosuch"}, "host has no config nosuch"),
    "unknown compute": (
        {"compute": "f8"},
        "compute must be f16, f32, tf32, f64, s32, f32_fast_accum or f32_promoted, got f8",
    ),
    "other compute": ({"compute": "f16"}, "compute must be f32 or tf32, got f16"),
    "negative m": ({"m": -1}, r"m must be in \[0, 2147483647\], got -1"),
    "large n": ({"n": 2**31}, r"n must be in \[0, 2147483647\], got 2147483648"),
    "negative k": ({"k": -5}, r"k must be in \[0, 2147483647\], got -5"),
    "negative batch": ({"batch": -1}, r"batch must be in \[0, 2147483647\], got -1"),
    "batch_inner": ({"batch": 3, "batch_inner": 2}, "batch_inner must divide batch=3, got 2"),
    "no batch_inner": ({"batch_inner": 0}, "batch_inner must divide batch=1, got 0"),
    "a_ld": ({"a_ld": 5}, "a.ld must be at least 6, got 5"),
    "b_ld": ({"b_ld": 4}, "b.ld must be at least 5, got 4"),
    "a_outer_stride": ({"a_outer_stride": -1}, "a.batch stride must not be negative, got -1"),
    "b_inner_stride": ({"b_inner_stride": -2}, "b.batch stride must not be negative, got -2"),
    "a too short": ({"a_ld": 7}, "a must hold at least 27 elements, got 24"),
    "b too short": ({"batch": 2, "batch_inner": 2}, "must hold at least"),
    "d too short": (
        {"batch": 2, "batch_inner": 2, "a_inner_stride": 0, "b_inner_stride": 0},
        "d must hold at least 40 elements, got 20",
    ),
    "a_ld overflows": ({"a_ld": HUGE}, "a must hold at least"),
    "b_ld overflows": ({"b_ld": HUGE}, "b must hold at least"),
    "b stride overflows": (
        {"batch": 9, "batch_inner": 9, "a_inner_stride": 0, "b_inner_stride": HUGE},
        "b must hold at least",
    ),
    "d overflows": (
        {"batch": 2**31 - 1, "batch_inner": 1, "m": 2**31 - 1, "k": 0, "a_outer_stride": 0},
        "d must hold at least",
    ),
    "beta without c": ({"beta": np.float64(1)}, "operands must be a, b, c, got 2"),
}


@pytest.mark.parametrize(("overrides", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_attributes(overrides, message):
    integers = {k: np.int64(v) if isinstance(v, int) else v for k, v in overrides.items()}
    call = Call(4, 5, 6, overrides=tuple(integers.items()))
    plain = Call(4, 5, 6)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"INVALID_ARGUMENT.*{message}"):
        call.run(*plain.operands, shape=plain.shape)


def test_malformed_operands():
    call = Call(4, 5, 6)
    a, b = call.operands
    for operands, message in [
        ((a, b.astype(np.int16)), "b must have a supported dtype"),
        ((a, b.astype(np.float64)), "host cannot run this: b's dtype must be f32, got f64"),
        ((a, b, a, b), "operands must be a, b, c, got 4"),
        ((a,), "operands must be a, b, got 1"),
    ]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*{message}"):
            call.run(*operands)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*c must have the dtype"
    ):
        Call(4, 5, 6, beta=1.0).run(a, b, np.zeros(20))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*c must hold at least"):
        Call(4, 5, 6, beta=1.0).run(a, b, np.zeros(19, np.float32))


REJECTED = {
    "f16 accumulator": ("f16", {"compute": "f16"}, "compute must be f32, got f16"),
    "tf32 of f64": ("f64", {"compute": "tf32"}, "compute must be f64, got tf32"),
    "f64 of f32": ("f32", {"compute": "f64"}, "compute must be f32 or tf32, got f64"),
    "f64 of c64": ("c64", {"compute": "f64"}, "compute must be f32 or tf32, got f64"),
    "f32 of c128": ("c128", {"compute": "f32"}, "compute must be f64, got f32"),
    "f32 of s8": ("s8", {"compute": "f32"}, "compute must be s32, got f32"),
    "mixed halves": ("f16", {"b_dtype": "bf16"}, "b's dtype must be f16, got bf16"),
    "s8 with f32": ("s8", {"b_dtype": "f32"}, "b's dtype must be s8, got f32"),
    "s32 operands": ("s8", {"a_dtype": "s32", "b_dtype": "s32"}, "the operands' dtype must be"),
    "f64 out of f32": ("f32", {"out_dtype": "f64"}, "the output's dtype must be f16, bf16 or f32"),
    "s8 out": ("s8", {"out_dtype": "s8"}, "the output's dtype must be s32, got s8"),
    "f32 out of f64": ("f64", {"out_dtype": "f32"}, "the output's dtype must be f64, got f32"),
    "c64 out of c128": ("c128", {"out_dtype": "c64"}, "the output's dtype must be c128, got c64"),
    "fractional alpha": ("s8", {"alpha": 0.5}, "alpha must be an int32 for integer operands"),
    "beta too large": ("u8", {"beta": 2.0**31}, "beta must be an int32 for integer operands"),
    "nan alpha": ("s8", {"alpha": float("nan")}, "alpha must be an int32 for integer operands"),
}


@pytest.mark.parametrize(("case", "changes", "reason"), REJECTED.values(), ids=REJECTED.keys())
def test_reject_names_the_rule(case, changes, reason):
    problem = query(Call(3, 4, 5, case))
    assert modules.cpu.reject("host", "auto", problem, DEVICE) == ""
    assert reason in modules.cpu.reject("host", "auto", problem | changes, DEVICE)


def test_configs():
    assert modules.cpu.implementations() == {"host": ["auto", *ISAS]}
    assert modules.cpu.reject("host", "portable", query(Call(1, 1, 1)), DEVICE) == ""
