"""Primitives and random functions of them as device code, against JAX on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from elementwise_cases import (
    BF16,
    BOOL,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    FLOATS,
    I32,
    INTEGERS,
    SHAPE,
    Case,
    checked,
    compiles,
    expected_of,
    is_float,
    needs_compiler,
    needs_nvrtc,
    of_elements,
    special,
)
from elementwise_library import Library
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax

from jax_tcgemm.epilogues.code.expressions import STORED

pytestmark = of_elements

# --- primitives -----------------------------------------------------------------------------------

COMPARISONS = {x: getattr(lax, x) for x in ("eq", "ne", "lt", "le", "gt", "ge")}


def float_primitives(acc, x, y, z):
    """Those that round once at most."""
    found = {name: f(x, y) for name, f in COMPARISONS.items()}
    for f in (lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.min, lax.rem):
        found[f.__name__] = f(x, y)
    for f in (lax.neg, lax.abs, lax.sign, lax.floor, lax.ceil, lax.is_finite, lax.sqrt, lax.square):
        found[f.__name__] = f(x)
    for method in lax.RoundingMethod:
        found[method.name] = lax.round(x, method)
    for power in (-2, -1, 0, 1, 2, 3, 7):
        found[f"power {power}"] = lax.integer_pow(x, power)
    for bits in ((8, 7), (5, 10), (4, 3), (3, 4), (8, 23)):
        found[f"reduce_precision {bits}"] = lax.reduce_precision(x, *bits)
    if x.dtype.itemsize > 1:
        found["nextafter"] = lax.nextafter(x, y)
    found["clamp"] = lax.clamp(x, y, z)
    found["clamp by scalars"] = lax.clamp(jnp.asarray(-1, x.dtype), y, jnp.asarray(2.5, x.dtype))
    found["select"] = lax.select(acc > 0, x, y)
    found["select_n"] = lax.select_n(jnp.clip(acc, 0, 2), x, y, z)
    bits = {1: jnp.uint8, 2: jnp.int16, 4: jnp.uint32, 8: jnp.int64}[x.dtype.itemsize]
    found["bits"] = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), 0, x), bits)
    return found


def integer_primitives(acc, x, y, z):
    found = {name: f(x, y) for name, f in COMPARISONS.items()}
    for f in (lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min):
        found[f.__name__] = f(x, y)
    for f in (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor):
        found[f.__name__] = f(x, y)
    for f in (lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic):
        found[f.__name__] = f(x, y)
        found[f"{f.__name__} by few"] = f(x, y & 7)
    for f in (lax.neg, lax.abs, lax.sign, lax.bitwise_not, lax.clz, lax.population_count):
        if f not in (lax.neg, lax.abs) or x.dtype.kind == "i":
            found[f.__name__] = f(x)
    found["power"] = lax.integer_pow(x, 5)
    found["clamp"] = lax.clamp(x, y, z)
    found["select"] = lax.select(acc > 0, x, y)
    found["constants"] = x * 3 - jnp.asarray(jnp.iinfo(x.dtype).min, x.dtype) + 7
    if x.dtype.kind == "u":
        bits = {1: jnp.float8_e5m2, 2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}
        found["float"] = lax.bitcast_convert_type(x, bits[x.dtype.itemsize])
    return found


def boolean_primitives(acc, x, y, z):
    found = {name: f(x, y) for name, f in COMPARISONS.items()}
    for f in (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.max, lax.min):
        found[f.__name__] = f(x, y)
    found["not"] = lax.bitwise_not(x)
    found["select"] = lax.select(z, x, y)
    found["constants"] = lax.select(z, jnp.full_like(x, True), jnp.zeros_like(x))
    return found


def conversions(acc, x):
    return {str(dtype): x.astype(dtype) for dtype in STORED}


def primitives(dtype):
    if dtype == BOOL:
        return boolean_primitives
    return float_primitives if is_float(dtype) else integer_primitives


LARGE = (24, 40)
PRIMITIVES = {
    **{
        f"{dtype}": Case(primitives(dtype), ((LARGE, dtype),) * 3, (I32,), LARGE, at_once=True)
        for dtype in STORED
    },
    **{
        f"conversions of {dtype}": Case(conversions, ((LARGE, dtype),), shape=LARGE, at_once=True)
        for dtype in STORED
    },
}
primitive_library, each_primitive = checked(PRIMITIVES)


@needs_compiler
@each_primitive
def test_each_primitive_is_that_of_jax(name, primitive_library):
    PRIMITIVES[name].check(primitive_library)


# --- functions of floats --------------------------------------------------------------------------

# Each with its exact values, and the numbers that it is given: any positive ones where None.
FUNCTIONS = {
    "exp": (lax.exp, np.exp, (-87, 88)),
    "exp2": (lax.exp2, np.exp2, (-126, 127)),
    "expm1": (lax.expm1, np.expm1, (-87, 88)),
    "log": (lax.log, np.log, None),
    "log1p": (lax.log1p, np.log1p, None),
    "log2": (jnp.log2, np.log2, None),
    "tanh": (lax.tanh, np.tanh, (-20, 20)),
    "logistic": (lax.logistic, lambda x: 1 / (1 + np.exp(-x)), (-87, 87)),
    "sin": (lax.sin, np.sin, (-1e4, 1e4)),
    "cos": (lax.cos, np.cos, (-1e4, 1e4)),
    "tan": (lax.tan, np.tan, (-1e4, 1e4)),
    "asin": (lax.asin, np.arcsin, (-1, 1)),
    "acos": (lax.acos, np.arccos, (-1, 1)),
    "atan": (lax.atan, np.arctan, (-1e4, 1e4)),
    "sinh": (lax.sinh, np.sinh, (-87, 87)),
    "cosh": (lax.cosh, np.cosh, (-87, 87)),
    "asinh": (lax.asinh, np.arcsinh, (-1e6, 1e6)),
    "acosh": (lax.acosh, np.arccosh, (1, 1e6)),
    "atanh": (lax.atanh, np.arctanh, (-1, 1)),
    "sqrt": (lax.sqrt, np.sqrt, None),
    "rsqrt": (lax.rsqrt, lambda x: 1 / np.sqrt(x), None),
    "cbrt": (lax.cbrt, np.cbrt, (-1e30, 1e30)),
    "erf": (lax.erf, scipy.special.erf, (-6, 6)),
    "erfc": (lax.erfc, scipy.special.erfc, (-6, 9)),
    "erf_inv": (lax.erf_inv, scipy.special.erfinv, (-1, 1)),
    "lgamma": (lax.lgamma, scipy.special.gammaln, (0.1, 1e6)),
}
BINARY_FUNCTIONS = {
    "pow": (lambda x, y: lax.pow(abs(x), y), lambda x, y: abs(x) ** y, (-9, 9)),
    "atan2": (lax.atan2, np.arctan2, (-9, 9)),
}
NUM_SAMPLES = 4000
FUNCTION_CASES = {
    f"{name} {dtype}": Case(f, accumulators=(dtype,) * operands, shape=(NUM_SAMPLES,))
    for table, operands in ((FUNCTIONS, 1), (BINARY_FUNCTIONS, 2))
    for name, (f, _, _) in table.items()
    for dtype in (F32, F64)
} | {
    # With special numbers; rounded, two results that are a little apart are mostly the same.
    f"{name} {dtype}": Case(f, accumulators=(dtype,) * operands, ulps=1.01, at_once=True)
    for table, operands in ((FUNCTIONS, 1), (BINARY_FUNCTIONS, 2))
    for name, (f, _, _) in table.items()
    for dtype in (F16, BF16)
    if name != "exp2"  # of which JAX rounds the exponent times log(2), too
}
function_library, each_function = checked(FUNCTION_CASES)


def samples(rng, domain, dtype):
    """Half of them evenly spread, half on a logarithmic scale towards 0."""
    size = NUM_SAMPLES
    if domain is None:
        return np.exp(rng.uniform(-60, 60, size)).astype(dtype)
    low, high = domain
    evenly = rng.uniform(low, high, size)
    small = np.sign(evenly) * max(abs(low), abs(high)) * np.exp(rng.uniform(-25, 0, size))
    is_small = (rng.random(size) < 0.5) & (small > low) & (small < high)
    return np.where(is_small, small, evenly).astype(dtype)


def units_off(got, exact):
    """The largest error, in units of the last place."""
    nearest = exact.astype(got.dtype)
    normal = np.isfinite(nearest) & (abs(nearest) > np.finfo(got.dtype).tiny)
    error = abs(got.astype(np.longdouble) - exact)
    return float((error / np.spacing(abs(nearest)))[normal].max())


@needs_compiler
@each_function
def test_each_function_is_as_accurate_as_that_of_jax(name, function_library):
    """With the functions of the C library here, and on a GPU with those of CUDA, or with ours."""
    case, (function, dtype) = FUNCTION_CASES[name], name.split()
    if case.accumulators[0].itemsize == 2:
        case.check(function_library)
        return
    f, exact, domain = (FUNCTIONS | BINARY_FUNCTIONS)[function]
    rng = np.random.default_rng(0)
    numbers = [samples(rng, domain, dtype) for _ in case.accumulators]
    if function in _OF_SCIPY and dtype == "float64":
        return  # Nothing here has these values to more places.
    exact = exact(
        *(x.astype(np.float64 if function in _OF_SCIPY else np.longdouble) for x in numbers)
    )
    theirs = units_off(np.asarray(f(*map(jnp.asarray, numbers))), np.asarray(exact, np.longdouble))
    got = units_off(
        *function_library.run(case.source, numbers, ()), np.asarray(exact, np.longdouble)
    )
    assert got <= max(theirs, _UNITS_OFF.get(function, 1)) + 0.01


_OF_SCIPY = ("erf", "erfc", "erf_inv", "lgamma")
# log2 is a quotient of logarithms: half a unit of one may be a whole unit of the quotient. Ours of
# angles are what a GPU runs: CUDA documents 2 units of its own sine and cosine, 4 of its tangent.
_UNITS_OFF = {"lgamma": 2, "log2": 1.5, "sin": 1.6, "cos": 1.6, "tan": 3.6}


# --- subnormal numbers ----------------------------------------------------------------------------


def arithmetic(library, x, y):
    """By jax.numpy or numpy."""
    return {
        "sum": x + y,
        "difference": x - y,
        "product": x * y,
        "half": x * np.float32(0.5),
        "quotient": x / y,
        "root": library.sqrt(abs(x)),
        "maximum": library.maximum(x, y),
        "minimum": library.minimum(x, y),
        "negative": -x,
        **{str(dtype): x.astype(dtype) for dtype in (F16, BF16, E4M3, E5M2, F64)},
        "sum of halves": x.astype(np.float16) + y.astype(np.float16),
    }


SUBNORMAL = Case(
    lambda x, y: (
        arithmetic(jnp, x, y)
        | {
            "next": lax.nextafter(x, y),
            "scaled bits": lax.bitcast_convert_type(x, jnp.int32) + 1,
        }
    ),
    accumulators=(F32, F32),
    shape=(4096,),
)


@needs_compiler
def test_subnormal_numbers_are_kept(tmp_path):
    rng = np.random.default_rng(0)
    exponents = rng.choice([-149, -140, -133, -127, -126, -24, -16, -14, -10, -9, -6], 4096)
    x, y = (np.ldexp(rng.uniform(-2, 2, 4096).astype("f"), exponents) for _ in range(2))
    x[x == 0] = 1  # NumPy takes either zero for the larger one.
    with np.errstate(all="ignore"):
        expected = arithmetic(np, x, y) | {
            "next": np.nextafter(x, y),
            "scaled bits": x.view(np.int32) + 1,
        }
    got = Library(tmp_path, [SUBNORMAL.source]).run(SUBNORMAL.source, (x, y), ())
    for name, array in zip(sorted(expected), got, strict=True):
        bits = f"u{array.itemsize}"
        np.testing.assert_array_equal(array.view(bits), expected[name].view(bits), name)


def nearest(x, dtype):
    """As XLA rounds: float64 to 8 bits at once, to 16 bits by way of float32."""
    if x.dtype == F64 and dtype.itemsize == 1:
        return np.asarray(jnp.asarray(x).astype(dtype))
    return x.astype(np.float32).astype(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", [F16, BF16, E4M3, E5M2], ids=str)
def test_every_rounding_and_the_ties_between(dtype, tmp_path):
    """All numbers of the dtype, the middles between them, and what is a little beside these."""
    every = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)
    every = np.sort(every.astype(np.float64)[np.isfinite(every.astype(np.float64))])
    middles = (every[1:] + every[:-1]) / 2
    beyond = every[-1] + (every[-1] - every[-2]) / 2
    numbers = np.concatenate([every, middles, [beyond, -beyond, np.inf, -np.inf, np.nan]])
    numbers = np.concatenate([numbers * scale for scale in (1, 1 + 2.0**-40, 1 - 2.0**-40)])
    for own in (F32, F64):
        with np.errstate(invalid="ignore"):
            x = numbers.astype(own)
        case = Case(lambda x: x.astype(dtype), accumulators=(own,), shape=x.shape)
        (got,) = Library(tmp_path, [case.source]).run(case.source, [x], ())
        with np.errstate(all="ignore"):
            want = nearest(x, dtype)
        is_number = ~np.isnan(want.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), ~is_number)
        bits = f"u{dtype.itemsize}"
        np.testing.assert_array_equal(got[is_number].view(bits), want[is_number].view(bits))


# --- random functions -----------------------------------------------------------------------------

TREE_DTYPES = (*FLOATS, E4M3, E5M2, *INTEGERS, BOOL)
# How an operand lies along the result.
TREE_LAYOUTS = {
    "whole": lambda x: x,
    "matrix": lambda x: x[0],
    "row": lambda x: x[0, 0],
    "column": lambda x: x[0, :, :1],
    "batch": lambda x: x[:, :1, :1],
    "scalar": lambda x: x[0, 0, 0],
    "reversed": lambda x: x[:, ::-1],
    "transposed": lambda x: x[0, :, :3].T[:, :, None],
    "reshaped": lambda x: x.reshape(18, 20).reshape(3, 6, 20),
}
OF_FLOATS = ("neg", "abs", "sign", "floor", "ceil", "sqrt", "square")
OF_TWO_FLOATS = ("add", "sub", "mul", "div", "max", "min", "rem")
OF_INTEGERS = ("bitwise_not", "population_count", "clz", "sign", "square")
OF_TWO_INTEGERS = (
    *("add", "sub", "mul", "div", "max", "min", "rem"),
    *("bitwise_and", "bitwise_or", "bitwise_xor"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic"),
)
OF_TWO_BOOLS = ("bitwise_and", "bitwise_or", "bitwise_xor", "max", "min")


@st.composite
def trees(draw, dtype=None, depth=5):
    """A function of operands, one of each dtype, that rounds once in each primitive."""
    dtype = draw(st.sampled_from(TREE_DTYPES)) if dtype is None else dtype
    below = functools.partial(trees, depth=depth - 1)
    kind = draw(
        st.sampled_from(
            ("leaf",) if not depth else ("leaf", "one", "two", "two", "other", "convert")
        )
    )
    if kind == "leaf":
        leaf = draw(st.sampled_from(("operand", "operand", "constant", "index")))
        if leaf == "constant":
            number = draw(st.sampled_from(list(special(dtype))))
            # Scalars JAX converts by itself, and not as XLA does.
            return lambda *operands: jnp.full(SHAPE, number)
        if leaf == "index" and dtype != BOOL:
            dim = draw(st.integers(0, 2))
            return lambda *operands: lax.broadcasted_iota(dtype, SHAPE, dim)
        place, layout = TREE_DTYPES.index(dtype), draw(st.sampled_from(list(TREE_LAYOUTS)))
        return lambda *operands: TREE_LAYOUTS[layout](operands[place])
    if kind == "one":
        x = draw(below(dtype))
        names = OF_FLOATS if is_float(dtype) else OF_INTEGERS if dtype != BOOL else ("bitwise_not",)
        f = getattr(lax, draw(st.sampled_from(names)))
        return lambda *operands: f(x(*operands))
    if kind == "two":
        x, y = draw(below(dtype)), draw(below(dtype))
        names = OF_TWO_FLOATS if is_float(dtype) else OF_TWO_INTEGERS
        f = getattr(lax, draw(st.sampled_from(OF_TWO_BOOLS if dtype == BOOL else names)))
        return lambda *operands: f(*alike(x(*operands), y(*operands)))
    if kind == "convert":
        x = draw(below())
        return lambda *operands: lax.convert_element_type(x(*operands), dtype)
    if dtype == BOOL:
        of = draw(st.sampled_from(TREE_DTYPES))
        x, y = draw(below(of)), draw(below(of))
        compare = COMPARISONS[draw(st.sampled_from(list(COMPARISONS)))]
        return lambda *operands: compare(*alike(x(*operands), y(*operands)))
    which, x, y = draw(below(BOOL)), draw(below(dtype)), draw(below(dtype))
    if draw(st.booleans()):
        return lambda *operands: jnp.where(which(*operands), x(*operands), y(*operands))
    z = draw(below(dtype))
    return lambda *operands: lax.clamp(*alike(x(*operands), y(*operands), z(*operands)))


def alike(*arrays):
    """Broadcast to one shape of the same rank."""
    return jnp.broadcast_arrays(*arrays)


@needs_compiler
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # each example is many functions, compiled together
    suppress_health_check=list(HealthCheck),
)
@given(functions=st.lists(trees(), min_size=15, max_size=15))
def test_random_functions_are_those_of_jax(functions, tmp_path_factory):
    operands = tuple((SHAPE, dtype) for dtype in TREE_DTYPES)
    with jax.enable_x64(True):
        cases = [
            Case(lambda acc, *x, f=f: jnp.broadcast_to(f(*x), acc.shape), operands)
            for f in functions
        ]
        library = Library(tmp_path_factory.mktemp("trees"), [case.source for case in cases])
        for case, expected in zip(cases, expected_of(cases), strict=True):
            try:
                case.check(library, expected)
            except AssertionError as error:
                error.add_note(str(case.source))
                raise


# --- NVRTC ----------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("cases", [PRIMITIVES, FUNCTION_CASES], ids=["each", "math"])
def test_all_primitives_compile_for_gpus(cases, target):
    compiles(cases, target)


# --- angles of any size ---------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_angles_of_any_size(name, function_library):
    """Beyond 105615 ours take other bits of 2 / pi; the largest floats and powers of two, too."""
    case = FUNCTION_CASES[f"{name} float32"]
    rng = np.random.default_rng(0)
    powers = np.ldexp(np.float32(1), np.arange(-30, 128)).astype(np.float32)
    drawn = np.exp(rng.uniform(np.log(1e4), np.log(3.4e38), 4000)).astype(np.float32)
    edges = np.float32([105615, 105616, 3.4028235e38, 1.17e-38])
    x = np.resize(np.concatenate([powers, drawn, edges]), NUM_SAMPLES)
    x = np.where(rng.random(x.size) < 0.5, x, -x)
    (got,) = function_library.run(case.source, [x], ())
    assert units_off(got, getattr(np, name)(x.astype(np.longdouble))) <= _UNITS_OFF[name]
    odd = np.resize(np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0]), NUM_SAMPLES)
    (got,) = function_library.run(case.source, [odd], ())
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, getattr(np, name)(odd))
        np.testing.assert_array_equal(np.signbit(got[3:5]), np.signbit(getattr(np, name)(odd[3:5])))
