"""Configs and problems that the cost model covers."""

from jax_tcgemm.problem.dtypes import DTYPES, FLOAT8
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection.cost_model.config_table import parse


def knows(names: tuple[str, ...]) -> bool:
    """Return whether all of these names are configs of wgmma, which the model covers."""
    return parse(names) is not None


def models(problem: Problem) -> bool:
    """Return whether the model covers a problem's dtypes and its shape, which must not be empty."""
    is_16bit = problem.a.dtype in ("f16", "bf16") and problem.compute in ("f32", "f32_promoted")
    is_tf32 = problem.a.dtype == "f32" and problem.compute == "tf32"
    is_real = is_16bit or is_tf32 or has_8_bits(problem)
    return is_real and problem.bytes > 0 and problem.k > 0


def has_8_bits(problem: Problem) -> bool:
    """Return whether operands are 8-bit floats or integers, which wgmma reads K-major only."""
    return is_f8(problem) or problem.compute == "s32"


def is_f8(problem: Problem) -> bool:
    """Return whether operands are 8-bit floats."""
    return DTYPES[problem.a.dtype] in FLOAT8
