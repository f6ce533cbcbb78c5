"""Primitives of JAX on one element, as C++ expressions.

Rounding:
  float16, bfloat16, 8-bit floats: computed as float32, rounded after each primitive, and after each
    step of those that are several (`integer_pow`, `polynomial`). Exact ones are not rounded again.
  +, -, * and `sqrt` of float32 and float64, / of float64: to nearest. A compiler may contract a
    product and a sum into one operation that rounds once, as XLA's do.
  / of float32: 2 units of the last place; by a constant, times its reciprocal. Both as XLA does it.
  functions of float32 and float64: CUDA's accurate ones, whose errors are in its Programming Guide
    (https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/mathematical-functions.html):
    1 or 2 units of the last place for most, 4 for `tan`, `acosh`, `erfc` and `pow`. The tests have
    measured 1 to 4 for XLA's on a CPU, 24 for `sinh` and `cosh`, 65 for `exp2`.
  conversions: to integers towards zero, saturating, NaN to 0; from float64 and integers to 16 bits
    by way of float32, as XLA does it; to float8_e4m3fn NaN where it is too large, to float8_e5m2
    infinity.
  `max` and `min`: NaN where either is, and -0 is less than 0.
"""

import dataclasses
import re
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

_BOOL = np.dtype(bool)
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)

# C++ types of stored elements; JAX's other dtypes have no code.
STORED = {
    _BOOL: "bool",
    **{
        np.dtype(f"{kind}{bits}"): f"{kind}{bits}_t"
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
    np.dtype(jnp.float8_e4m3fn): "Float8E4M3",
    np.dtype(jnp.float8_e5m2): "Float8E5M2",
    np.dtype(jnp.float16): "__half",
    np.dtype(jnp.bfloat16): "__nv_bfloat16",
    _F32: "float",
    _F64: "double",
}


def is_float(dtype: np.dtype) -> bool:
    """Whether the dtype is of floats, of any size."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_narrow(dtype: np.dtype) -> bool:
    """Whether the dtype is of floats that are computed with as float32."""
    return is_float(dtype) and dtype.itemsize < 4


def computed(dtype: np.dtype) -> str:
    """The C++ type of a number of the dtype in a register."""
    return "float" if is_narrow(dtype) else STORED[dtype]


def literal(number: np.generic) -> str:
    """A number as C++ text."""
    dtype = number.dtype
    if dtype == _BOOL:
        return "true" if number else "false"
    if not is_float(dtype):
        if dtype.itemsize < 4 or dtype.itemsize == 8:
            is_smallest = dtype.kind == "i" and number == np.iinfo(dtype).min
            return f"kSmallest<{STORED[dtype]}>" if is_smallest else f"{STORED[dtype]}{{{number}}}"
        if number == np.iinfo(np.int32).min:
            return "kSmallest<int32_t>"
        return f"{number}u" if dtype.kind == "u" else str(number)
    kind = computed(dtype)
    number = number.astype(_F32 if kind == "float" else _F64)
    if np.isnan(number):
        return f"not_a_number<{kind}>()"
    if np.isinf(number):
        return f"{'-' if number < 0 else ''}infinity<{kind}>()"
    text = str(number)
    # Also where a compiler reads it as double first.
    if number.dtype.type(float(text)) != number:
        text = float(number).hex()
    return text + "f" * (kind == "float")


@dataclasses.dataclass(frozen=True)
class Types:
    """Dtypes and parameters of an equation, which a rule takes with the operands' expressions."""

    operands: tuple[np.dtype, ...]
    result: np.dtype
    params: dict


class NoExpressionError(ValueError):
    """There is none for these dtypes or parameters; the message is the rule."""


# A float32 in C++ text, such as `literal` gives.
_CONSTANT = re.compile(r"(-?(?=\d)[\d.]+(?:e[+-]?\d+)?)f")

# From operands' expressions, each a name or a literal, to one for the result.
Rule = Callable[..., str]


def _float_only(types: Types) -> None:
    if not is_float(types.result):
        raise NoExpressionError(f"be of floats, got {types.result}")


def _rounding(rule: Rule) -> Rule:
    """Rounds what a rule computes in float32 to the result's dtype."""

    def rounding(types: Types, *operands: str) -> str:
        text = rule(types, *operands)
        return f"rounded<{STORED[types.result]}>({text})" if is_narrow(types.result) else text

    return rounding


def _arithmetic(operator: str, function: str) -> Rule:
    @_rounding
    def rule(types, x, y):
        return f"{x} {operator} {y}" if is_float(types.result) else f"{function}({x}, {y})"

    return rule


@_rounding
def _div(types, x, y):
    constant = _CONSTANT.fullmatch(y)
    if types.result == _F32 and constant and np.isfinite(1 / np.float32(constant[1])):
        # As XLA does it.
        return f"{x} * {literal(1 / np.float32(constant[1]))}"
    return f"divide({x}, {y})"


def _function(name: str) -> Rule:
    """One of the header, for all dtypes."""
    return lambda types, *operands: f"{name}({', '.join(operands)})"


def _mathematical(name: str) -> Rule:
    """One of CUDA's."""

    @_rounding
    def rule(types, *operands):
        _float_only(types)
        return f"{_suffixed(name, types.result)}({', '.join(operands)})"

    return rule


def _suffixed(name: str, dtype: np.dtype) -> str:
    return name if dtype == _F64 else name + "f"


def _exact(name: str) -> Rule:
    """One of CUDA's whose results need no rounding; integers are left as they are."""

    def rule(types, x):
        _float_only(types)
        return f"{_suffixed(name, types.result)}({x})"

    return rule


def _comparison(operator: str) -> Rule:
    return lambda types, x, y: f"{x} {operator} {y}"


def _neg(types, x):
    if is_float(types.result):
        return f"-({x})" if x.startswith("-") else f"-{x}"
    return f"subtract({literal(types.result.type(0))}, {x})"


def _abs(types, x):
    if is_float(types.result):
        return f"{_suffixed('fabs', types.result)}({x})"
    return x if types.result.kind == "u" else f"absolute({x})"


def _rem(types, x, y):
    if is_float(types.result):
        return f"{_suffixed('fmod', types.result)}({x}, {y})"
    return f"remainder({x}, {y})"


def _round(types, x):
    _float_only(types)
    to_even = int(types.params["rounding_method"]) == 1
    return f"{_suffixed('rint' if to_even else 'round', types.result)}({x})"


@_rounding
def _pow(types, x, y):
    _float_only(types)
    exponent = convert(types.operands[1], types.result, y)
    return f"{_suffixed('pow', types.result)}({x}, {exponent})"


def _of_floats(name: str) -> Rule:
    """One of ours."""

    @_rounding
    def rule(types, x):
        _float_only(types)
        return f"{name}({x})"

    return rule


def _nextafter(types, x, y):
    if types.result.itemsize == 1:
        raise NoExpressionError(f"be of 16 bits or more, got {types.result}")
    return f"next_after<{STORED[types.result]}>({x}, {y})"


def _not(types, x):
    return f"!{x}" if types.result == _BOOL else f"~{x}"


def _select(types, which, *cases):
    if which.isdigit() or which in ("true", "false"):
        return cases[int(which) if which.isdigit() else which == "true"]
    if types.operands[0] == _BOOL:
        no, *yes = cases
        return f"{which} ? {yes[0]} : {no}" if yes else no
    *first, text = cases
    for number, case in reversed(list(enumerate(first))):
        text = f"{which} == {number} ? {case} : {text}"
    return text


def _clamp(types, least, x, most):
    return f"minimum(maximum({least}, {x}), {most})"


def convert(old: np.dtype, new: np.dtype, x: str) -> str:
    """The expression of `x`, of dtype `old`, converted as XLA does it."""
    if old == new:
        return x
    if new == _BOOL:
        return f"{x} != 0"
    if is_float(old) and not is_float(new):
        return f"to_integer<{STORED[new]}>({x})"
    if not is_narrow(new):
        return x if is_narrow(old) and new == _F32 else f"static_cast<{STORED[new]}>({x})"
    if not is_float(old):
        x = f"static_cast<float>({x})"
    is_exact = old == _BOOL or (is_narrow(old) and _holds(new, old))
    return x if is_exact else f"rounded<{STORED[new]}>({x})"


def _holds(new: np.dtype, old: np.dtype) -> bool:
    """Whether all numbers of one float dtype are also of another."""
    new, old = jnp.finfo(new), jnp.finfo(old)
    return new.nmant >= old.nmant and new.minexp <= old.minexp and new.maxexp >= old.maxexp


def _convert_element_type(types, x):
    return convert(types.operands[0], types.result, x)


def _bitcast(types, x):
    (old,), new = types.operands, types.result
    if old.itemsize != new.itemsize:
        raise NoExpressionError(f"keep the number of bits, got {old} to {new}")
    stored = f"narrow<{STORED[old]}>({x})" if is_narrow(old) else x
    cast = f"bit_cast<{STORED[new]}>({stored})"
    return f"wide({cast})" if is_narrow(new) else cast


@_rounding
def _reduce_precision(types, x):
    # XLA reduces 8-bit floats as float16; bfloat16 may be a float, whose subnormals are its own.
    like = "__half" if jnp.finfo(types.result).nexp <= 5 else computed(types.result)
    bits = f"{types.params['exponent_bits']}, {types.params['mantissa_bits']}"
    return f"reduce_precision<{like}, {bits}>({x})"


EXPRESSIONS: dict[str, Rule] = {
    "abs": _abs,
    "add": _arithmetic("+", "add"),
    "add_any": _arithmetic("+", "add"),
    "and": _comparison("&"),
    "bitcast_convert_type": _bitcast,
    "clamp": _clamp,
    "clz": _function("count_leading_zeros"),
    "cos": _of_floats("cosine"),
    "convert_element_type": _convert_element_type,
    "div": _div,
    "eq": _comparison("=="),
    "erf_inv": _mathematical("erfinv"),
    "ge": _comparison(">="),
    "gt": _comparison(">"),
    "is_finite": _function("is_finite"),
    "le": _comparison("<="),
    "logistic": _of_floats("logistic"),
    "lt": _comparison("<"),
    "max": _function("maximum"),
    "min": _function("minimum"),
    "mul": _arithmetic("*", "multiply"),
    "ne": _comparison("!="),
    "neg": _neg,
    "nextafter": _nextafter,
    "not": _not,
    "or": _comparison("|"),
    "population_count": _function("population_count"),
    "pow": _pow,
    "reduce_precision": _reduce_precision,
    "rem": _rem,
    "round": _round,
    "select_n": _select,
    "shift_left": _function("shift_left"),
    "shift_right_arithmetic": _function("shift_right_arithmetic"),
    "shift_right_logical": _function("shift_right_logical"),
    "sign": _function("sign"),
    "sin": _of_floats("sine"),
    "sub": _arithmetic("-", "subtract"),
    "tan": _of_floats("tangent"),
    "threefry2x32": _function("threefry2x32"),
    "xor": _comparison("^"),
    **{name: _exact(name) for name in ("ceil", "floor")},
    **{
        name: _mathematical(name)
        for name in (
            *("exp", "exp2", "expm1", "log", "log1p", "log2", "cbrt", "sqrt", "rsqrt", "atan2"),
            *("asin", "acos", "atan"),
            *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
            *("erf", "erfc", "lgamma"),
        )
    },
}
