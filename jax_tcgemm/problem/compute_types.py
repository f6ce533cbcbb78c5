"""Compute types by cuTENSOR's names, the dtypes that take them, and XLA's equivalents.

f32, f64         multiplied and accumulated in that type
tf32             float32 rounded to TF32, accumulated in float32
bf16, f16        float32 rounded to that type, accumulated in float32
3xtf32           split-precision emulation of float32 by three TF32 products: nearly float32
9xbf16, 4xf16    split-precision emulation of float32 by nine bfloat16 or four float16 products
8xint8           emulation of float64 by int8 products
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.problem.precision import resolve

_SINGLE = ("f32", "tf32", "3xtf32", "9xbf16", "4xf16")
_DOUBLE = ("f64", "f32", "8xint8")

# The dtypes of cuTENSOR and, for contractions, their compute types.
CONTRACTION_COMPUTE = {
    np.dtype(jnp.float16): ("f32",),
    np.dtype(jnp.bfloat16): ("f32",),
    np.dtype(jnp.float32): (*_SINGLE, "bf16", "f16"),
    np.dtype(jnp.float64): _DOUBLE,
    np.dtype(jnp.complex64): _SINGLE,
    np.dtype(jnp.complex128): _DOUBLE,
}

# Compute types of everything but contractions.
ELEMENTWISE_COMPUTE = {
    np.dtype(jnp.float16): ("f32", "f16"),
    np.dtype(jnp.bfloat16): ("f32", "bf16"),
    np.dtype(jnp.float32): ("f32",),
    np.dtype(jnp.float64): ("f64",),
    np.dtype(jnp.complex64): ("f32",),
    np.dtype(jnp.complex128): ("f64",),
}

_PRESETS = {
    "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32,
    "3xtf32": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "bf16": lax.DotAlgorithmPreset.BF16_BF16_F32,
    "f16": lax.DotAlgorithmPreset.F16_F16_F32,
    "9xbf16": lax.DotAlgorithmPreset.BF16_BF16_F32_X9,
}


def check_compute_type(op: str, compute_type, dtype: np.dtype, known) -> None:
    """Raise ValueError for a compute type that the dtype does not have."""
    names = known.get(np.dtype(dtype), ())
    if not isinstance(compute_type, str | None) or compute_type not in (None, *names):
        rule = f"one of {', '.join(names)} or None" if names else "None"
        raise ValueError(
            f"{op}: compute_type must be {rule} for {np.dtype(dtype)}, got {compute_type=}; "
            "None takes jax.default_matmul_precision"
        )


def precision_of(compute_type: str | None, precision, dtype: np.dtype, platform: str):
    """Return a precision for XLA and our GEMMs that is at least as precise as the compute type.

    Presets exist for real operands on CUDA; other operands get the highest precision.
    """
    if compute_type is None:
        return precision
    highest = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    if dtype == np.complex64 and compute_type == "tf32" and platform == "cuda":
        return (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
    if dtype != np.float32 or platform != "cuda":
        return highest
    return _PRESETS.get(compute_type, highest)


def cutensor_compute(compute_type: str | None, precision, dtype, result_dtype) -> tuple[str, str]:
    """Return cuTENSOR's compute type of a contraction, or why it has none; the other is ""."""
    if dtype not in CONTRACTION_COMPUTE:
        return "", f"cuTENSOR does not contract {dtype}"
    if result_dtype != dtype:
        return "", f"cuTENSOR makes {dtype} from {dtype}, not {result_dtype}"
    if compute_type is not None:
        return compute_type, ""
    numerics = resolve(dtype, dtype, result_dtype, precision, "cuda")
    if isinstance(numerics, str):
        return "", numerics
    if numerics.lhs_dtype != dtype or numerics.compute not in CONTRACTION_COMPUTE[dtype]:
        return "", f"cuTENSOR does not contract {dtype} as the precision asks for"
    return numerics.compute, ""
