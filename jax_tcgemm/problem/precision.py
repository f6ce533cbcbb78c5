"""Which arithmetic a product asks for: `lax.dot_general`'s dtypes and precision, resolved.

Follows what XLA does on each platform:

* CUDA: float32 and complex64 use TF32 unless the precision is HIGHEST. XLA's cuBLASLt path takes
  TF32 for both DEFAULT and HIGH (`compute_precision <= 1` in GetBlasComputationType of
  xla/stream_executor/gpu/gpu_blas_lt.cc), so HIGH is no more accurate there, nor here.
* CPU: there is no TF32; float32 is always float32.
* float16 and bfloat16 accumulate in float32, except under the preset F16_F16_F16.
* float8_e4m3fn and float8_e5m2, also one by the other, accumulate in float32. Hopper's tensor core
  adds up with a mantissa of about 14 bits, so that sums leave it every 128 of K, except under the
  presets with FAST_ACCUM. A result of such a dtype is rounded from float32.
* int8 and uint8, also one by the other, accumulate in int32. A narrower integer result is that sum
  modulo its width.
* Under the presets of `_SPLIT_PRESETS`, float32 and complex64 are sums of bfloat16 or TF32 terms,
  whose products are exact and accumulate in float32. XLA has them as several products, or none
  (docs/precise.md). Other operands are multiplied as ever, which is at least as precise.
"""

import dataclasses
import itertools
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.problem.dtypes import DTYPE_NAMES, FLOAT8

_F16, _BF16, _F32, _F64 = map(np.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))
_S8, _U8, _S32 = map(np.dtype, (jnp.int8, jnp.uint8, jnp.int32))
_C64, _C128 = map(np.dtype, (jnp.complex64, jnp.complex128))

_Preset = lax.DotAlgorithmPreset

# Preset: (dtype of both operands, compute, result dtypes without a conversion, the first one else).
_PRESETS = {
    _Preset.F16_F16_F16: (_F16, "f16", (_F16,)),
    _Preset.F16_F16_F32: (_F16, "f32", (_F32, _F16)),
    _Preset.BF16_BF16_F32: (_BF16, "f32", (_F32, _BF16)),
    _Preset.TF32_TF32_F32: (_F32, "tf32", (_F32,)),
    _Preset.F32_F32_F32: (_F32, "f32", (_F32,)),
    _Preset.F64_F64_F64: (_F64, "f64", (_F64,)),
}

# Preset of 8-bit floats: compute.
_F8_PRESETS = {
    _Preset.ANY_F8_ANY_F8_F32: "f32",
    _Preset.ANY_F8_ANY_F8_ANY: "f32",
    _Preset.ANY_F8_ANY_F8_F32_FAST_ACCUM: "f32_fast_accum",
    _Preset.ANY_F8_ANY_F8_ANY_FAST_ACCUM: "f32_fast_accum",
}


# Preset: (dtype of a term, its bits of mantissa, terms of an operand, what the numbers of two terms
# that are multiplied add up to at most, the dtypes that are one term).
_SPLIT_PRESETS = {
    _Preset.BF16_BF16_F32_X3: (_BF16, 7, 2, 1, (_BF16, *FLOAT8)),
    _Preset.BF16_BF16_F32_X6: (_BF16, 7, 3, 2, (_BF16, *FLOAT8)),
    _Preset.BF16_BF16_F32_X9: (_BF16, 7, 3, 4, (_BF16, *FLOAT8)),
    _Preset.TF32_TF32_F32_X3: (_F32, 10, 2, 1, (_F16, _BF16, *FLOAT8)),
}


# Presets that promote accumulators, which makes a product about 1.3 times as long.
_PROMOTED = (_Preset.BF16_BF16_F32_X9,)


@dataclasses.dataclass(frozen=True)
class Terms:
    """Operands as sums of terms, largest first, each as wide as products can be of that are exact.

    Attributes:
      mantissa_bits: those of a term, beside 8 bits of exponent.
      pairs: which term of the left operand is multiplied by which of the right one, in the order
        in which the products are added: small ones first, so that there is a large sum to round
        only for as long as without terms.
      is_complex: whether real and imaginary parts have such terms.
      device: where a kernel of ours splits the operands, in rows that it aligns; None: XLA does.
      promoted: whether what the tensor core accumulates of a few k-tiles is added in float32: it
        drops low bits of what it adds to large accumulators, more than these terms leave out.
    """

    mantissa_bits: int
    pairs: tuple[tuple[int, int], ...]
    is_complex: bool
    device: Hashable = None
    promoted: bool = False

    @property
    def number(self) -> int:
        """How many products of real numbers are added for each of real or complex operands."""
        return len(self.pairs) * (2 if self.is_complex else 1)


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Dtypes and accumulator of one product.

    The operands are converted to `lhs_dtype` and `rhs_dtype`, or split into `terms` of these, the
    product is formed in `compute` and written as `out_dtype`; a result of another dtype is
    converted from that.
    """

    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    compute: str
    terms: Terms | None = None


def canonical_precision(op: str, precision):
    """The canonical form of a `precision` argument: None, a pair, a preset or a DotAlgorithm.

    None takes `jax.default_matmul_precision`. Raises ValueError for anything else.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    if precision is None or isinstance(precision, lax.DotAlgorithm | _Preset):
        return precision
    if isinstance(precision, str) and precision in _Preset.__members__:
        return _Preset[precision]
    is_pair = isinstance(precision, list | tuple) and len(precision) == 2
    pair = precision if is_pair else (precision, precision)
    try:
        if not all(isinstance(p, str | lax.Precision | None) for p in pair):
            raise ValueError
        return tuple(lax.Precision(p) for p in pair)
    except ValueError:
        raise ValueError(
            f"{op}: precision must be None, a lax.Precision or its name, a pair of them, a "
            f"lax.DotAlgorithmPreset or its name, or a lax.DotAlgorithm, got {precision=}; see "
            "jax.lax.Precision"
        ) from None


def is_split(precision) -> bool:
    """Whether a canonical precision asks for float32 as a sum of narrower numbers."""
    return isinstance(precision, _Preset) and precision in _SPLIT_PRESETS


def for_xla(precision):
    """The precision to ask XLA for where it multiplies operands as they are.

    Of terms it has not all that their names say, and on CPUs not all names.
    """
    return (lax.Precision.HIGHEST,) * 2 if is_split(precision) else precision


# Presets of 8-bit floats, each with the one that promotes accumulators as it does not.
_FAST_FLOAT8 = {
    _Preset.ANY_F8_ANY_F8_F32_FAST_ACCUM: _Preset.ANY_F8_ANY_F8_F32,
    _Preset.ANY_F8_ANY_F8_ANY_FAST_ACCUM: _Preset.ANY_F8_ANY_F8_ANY,
}
_FLOAT8 = {*_FAST_FLOAT8, *_FAST_FLOAT8.values()}


def of_dequantized(precision):
    """Return a canonical precision for operands that are no 8-bit floats any more."""
    return None if isinstance(precision, _Preset) and precision in _FLOAT8 else precision


def of_block_scales(precision):
    """Return a canonical precision for accumulators that leave the tensor core with each block."""
    is_preset = isinstance(precision, _Preset)
    return _FAST_FLOAT8.get(precision, precision) if is_preset else precision


def resolve(lhs_dtype, rhs_dtype, result_dtype, precision, platform: str) -> Numerics | str:
    """The arithmetic of a product, or why none of our implementations has it.

    Args:
      lhs_dtype: dtype of the left operand.
      rhs_dtype: dtype of the right operand.
      result_dtype: dtype of the result, as `lax.dot_general` types it.
      precision: as `canonical_precision` returns it.
      platform: "cuda" or "cpu".

    Returns:
      Numerics, or a phrase saying what is not covered.
    """
    if is_split(precision):
        dtypes = lhs_dtype, rhs_dtype
        if (numerics := _resolve_terms(*dtypes, result_dtype, precision, platform)) is not None:
            return numerics
        precision = None
    if isinstance(precision, lax.DotAlgorithm):
        return "it asks for a lax.DotAlgorithm, which only XLA reads"
    if isinstance(precision, _Preset) and precision is not _Preset.DEFAULT:
        return _resolve_preset(lhs_dtype, rhs_dtype, result_dtype, precision, platform)
    if lhs_dtype in FLOAT8 and rhs_dtype in FLOAT8:
        return _resolve_float8(lhs_dtype, rhs_dtype, result_dtype, "f32")
    if {lhs_dtype, rhs_dtype} == {_S8, _U8}:
        # What instructions multiply by one another as they are.
        return _resolve_bytes(lhs_dtype, rhs_dtype, result_dtype)
    # Like lax.dot_general, which converts other operands of unlike dtypes to the result's.
    dtype = lhs_dtype if lhs_dtype == rhs_dtype else result_dtype
    if dtype not in DTYPE_NAMES or dtype == _S32 or dtype in FLOAT8:
        return f"no implementation multiplies {dtype}"
    is_pair = isinstance(precision, tuple)
    full = is_pair and lax.Precision.HIGHEST in precision
    single = "tf32" if platform == "cuda" and not full else "f32"
    out = result_dtype
    if dtype in (_F16, _BF16):
        supported, compute = (_F16, _BF16, _F32), "f32"
    elif dtype == _F32:
        supported, compute = (_F16, _BF16, _F32), single
    elif dtype == _F64:
        # Narrower results are rounded from the float64 one.
        supported, compute, out = (_F16, _BF16, _F32, _F64), "f64", _F64
    elif dtype == _C64:
        supported, compute = (_C64,), single
    elif dtype == _C128:
        supported, compute = (_C128,), "f64"
    else:
        return _resolve_bytes(dtype, dtype, result_dtype)
    if result_dtype not in supported:
        return f"no implementation makes {result_dtype} from {dtype}"
    return Numerics(dtype, dtype, out, compute)


def _resolve_terms(lhs_dtype, rhs_dtype, result_dtype, preset, platform) -> Numerics | None:
    """None where neither operand is float32 or complex64, or one is none that converts to it."""
    dtypes = {lhs_dtype, rhs_dtype}
    is_complex = _C64 in dtypes
    if not (dtypes & {_F32, _C64} and dtypes <= {_C64, _F32, _F16, _BF16, *FLOAT8}):
        return None
    term_dtype, mantissa_bits, most, largest_sum, whole = _SPLIT_PRESETS[preset]
    numbers = (1 if dtype in whole else most for dtype in (lhs_dtype, rhs_dtype))
    pairs = [pair for pair in itertools.product(*map(range, numbers)) if sum(pair) <= largest_sum]
    order = tuple(sorted(pairs, key=sum, reverse=True))
    terms = Terms(mantissa_bits, order, is_complex, promoted=preset in _PROMOTED)
    compute = "tf32" if term_dtype == _F32 and platform == "cuda" else "f32"
    is_made = result_dtype in (_F16, _BF16, _F32) and not is_complex
    return Numerics(term_dtype, term_dtype, result_dtype if is_made else _F32, compute, terms)


def _resolve_float8(lhs_dtype, rhs_dtype, result_dtype, compute):
    if result_dtype not in (_F16, _BF16, _F32, *FLOAT8):
        return f"no implementation makes {result_dtype} from {lhs_dtype} and {rhs_dtype}"
    out = _F32 if result_dtype in FLOAT8 else result_dtype
    return Numerics(lhs_dtype, rhs_dtype, out, compute)


def _resolve_bytes(lhs_dtype, rhs_dtype, result_dtype):
    # Sums modulo 2^32 are right modulo 2^8 and 2^16 too, but say nothing about 64 bits.
    if result_dtype.kind not in "iu" or result_dtype.itemsize > 4:
        inputs = lhs_dtype if lhs_dtype == rhs_dtype else f"{lhs_dtype} and {rhs_dtype}"
        return f"no implementation makes {result_dtype} from {inputs}"
    return Numerics(lhs_dtype, rhs_dtype, _S32, "s32")


def _resolve_preset(lhs_dtype, rhs_dtype, result_dtype, preset, platform):
    if preset in _F8_PRESETS:
        if not (lhs_dtype in FLOAT8 and rhs_dtype in FLOAT8):
            return f"the algorithm {preset} is for {' and '.join(map(str, FLOAT8))}"
        return _resolve_float8(lhs_dtype, rhs_dtype, result_dtype, _F8_PRESETS[preset])
    if preset not in _PRESETS:
        return f"no implementation has the algorithm {preset}"
    operand_dtype, compute, outs = _PRESETS[preset]
    if jnp.issubdtype(lhs_dtype, jnp.complexfloating) or jnp.issubdtype(
        rhs_dtype, jnp.complexfloating
    ):
        return f"the algorithm {preset} is for real operands"
    if preset is _Preset.BF16_BF16_F32 and _F32 in (lhs_dtype, rhs_dtype):
        return f"the algorithm {preset} rounds float32 operands inside the product"
    if platform == "cpu" and compute == "tf32":
        compute = "f32"
    out = result_dtype if result_dtype in outs else outs[0]
    return Numerics(operand_dtype, operand_dtype, out, compute)
