"""The host implementation through the FFI call itself: csrc/cpu, csrc/ffi/gemm.cc.

Called as a lowered program would call it, so that attributes no Python function produces are met
too.
"""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import _modules
from jax_tcgemm.epilogue import Epilogue

pytestmark = pytest.mark.usefixtures("x64")

ISAS = ["avx512", "avx2", "portable"]

# dtypes of A, B and D, compute, and the largest error relative to sum |a||b| (0: exact).
CASES = {
    "f16": ("float16", "float16", "float16", "f32", 6e-4),
    "f16_f32": ("float16", "float16", "float32", "f32", 1e-6),
    "f16_bf16": ("float16", "float16", "bfloat16", "f32", 5e-3),
    "bf16": ("bfloat16", "bfloat16", "bfloat16", "f32", 5e-3),
    "bf16_f16": ("bfloat16", "bfloat16", "float16", "f32", 6e-4),
    "bf16_f32": ("bfloat16", "bfloat16", "float32", "f32", 1e-6),
    "f32": ("float32", "float32", "float32", "f32", 1e-6),
    "f32_f16": ("float32", "float32", "float16", "f32", 6e-4),
    "f32_bf16": ("float32", "float32", "bfloat16", "f32", 5e-3),
    "tf32": ("float32", "float32", "float32", "tf32", 1e-6),
    "f64": ("float64", "float64", "float64", "f64", 1e-14),
    "s8": ("int8", "int8", "int32", "s32", 0),
    "u8": ("uint8", "uint8", "int32", "s32", 0),
    "s8_u8": ("int8", "uint8", "int32", "s32", 0),
    "u8_s8": ("uint8", "int8", "int32", "s32", 0),
    "c64": ("complex64", "complex64", "complex64", "f32", 2e-6),
    "c64_tf32": ("complex64", "complex64", "complex64", "tf32", 2e-6),
    "c128": ("complex128", "complex128", "complex128", "f64", 1e-14),
}
LAYOUTS = ["NN", "NT", "TN", "TT"]


@dataclasses.dataclass(frozen=True)
class Call:
    """One FFI call; `None` stands for what a well-formed program has there."""

    m: int
    n: int
    k: int
    case: str = "f32"
    layout: str = "NN"
    config: str = "auto"
    alpha: float = 1.0
    beta: float = 0.0
    batch: tuple[int, int] = (1, 1)
    a_strides: tuple[int, int] | None = None
    b_strides: tuple[int, int] | None = None
    a_ld: int | None = None
    b_ld: int | None = None
    overrides: tuple = ()

    @property
    def rows_columns(self):
        """Extents of A and of B as they lie in memory."""
        a, b = (self.m, self.k), (self.k, self.n)
        return a[::-1] if self.layout[0] == "T" else a, b[::-1] if self.layout[1] == "T" else b

    @functools.cached_property
    def operands(self):
        """A and B in memory: flat arrays long enough for the strides."""
        flat = []
        for dtype, (rows, _), ld, strides, seed in zip(
            CASES[self.case], self.rows_columns, self.lds, self.strides, (1, 2), strict=False
        ):
            size = rows * ld + sum(s * (n - 1) for s, n in zip(strides, self.batch, strict=True))
            flat.append(random(dtype, max(size, 0), seed))
        return flat

    @property
    def lds(self):
        a, b = self.rows_columns
        return self.a_ld or a[1], self.b_ld or b[1]

    @property
    def strides(self):
        """Outer and inner batch strides of A and of B."""
        found = []
        for given, (rows, _), ld in zip(
            (self.a_strides, self.b_strides), self.rows_columns, self.lds, strict=True
        ):
            found.append((self.batch[1] * rows * ld, rows * ld) if given is None else given)
        return found

    @property
    def shape(self):
        return (self.batch[0] * self.batch[1], self.m, self.n)

    @property
    def attributes(self):
        (a_outer, a_inner), (b_outer, b_inner) = self.strides
        integers = {
            "abi": _modules.cpu.abi_version,
            "batch": self.batch[0] * self.batch[1],
            "batch_inner": self.batch[1],
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "a_ld": self.lds[0],
            "a_outer_stride": a_outer,
            "a_inner_stride": a_inner,
            "b_ld": self.lds[1],
            "b_outer_stride": b_outer,
            "b_inner_stride": b_inner,
        }
        return {
            "implementation": "host",
            "config": self.config,
            "compute": CASES[self.case][3],
            "a_transposed": self.layout[0] == "T",
            "b_transposed": self.layout[1] == "T",
            "alpha": np.float64(self.alpha),
            "beta": np.float64(self.beta),
            **{name: np.int64(value) for name, value in integers.items()},
            **Epilogue().attributes(),
            **dict(self.overrides),
        }

    def run(self, *operands, shape=None, dtype=None):
        """Runs the call on its own operands or on those given."""
        result = jax.ShapeDtypeStruct(
            self.shape if shape is None else shape, dtype or CASES[self.case][2]
        )
        call = jax.ffi.ffi_call("tcgemm_gemm", result)
        attributes = self.attributes
        operands = [jnp.asarray(x) for x in operands or self.operands]
        return np.asarray(jax.jit(lambda *xs: call(*xs, gemm=attributes))(*operands))

    def matrices(self, index):
        """op(A) or op(B) of every batch index, in double precision."""
        dtype = CASES[self.case][index]
        flat, strides = self.operands[index], self.strides[index]
        rows, columns = self.rows_columns[index]
        flat = wide(flat, dtype, tf32=CASES[self.case][3] == "tf32")
        item = flat.itemsize
        view = np.lib.stride_tricks.as_strided(
            flat,
            (*self.batch, rows, columns),
            (strides[0] * item, strides[1] * item, self.lds[index] * item, item),
        ).reshape(self.shape[0], rows, columns)
        return view.swapaxes(1, 2) if self.layout[index] == "T" else view

    def reference(self, c=None):
        """The result and, for each element, the sum of the magnitudes that went into it."""
        a, b = self.matrices(0), self.matrices(1)
        d, magnitude = a @ b * self.alpha, np.abs(a) @ np.abs(b) * abs(self.alpha)
        if c is not None:
            c = wide(c, c.dtype)
            d, magnitude = d + c * self.beta, magnitude + np.abs(c * self.beta)
        return d, magnitude

    def check(self, c=None):
        got = self.run(*self.operands, *([] if c is None else [c]))
        want, magnitude = self.reference(c)
        tolerance = CASES[self.case][4]
        if tolerance == 0:
            np.testing.assert_array_equal(got, want.astype(np.int64).astype(np.int32))
        else:
            got = wide(got, got.dtype)
            assert got.shape == want.shape
            # An element of a complex product is made of four real ones.
            np.testing.assert_array_less(np.abs(got - want), tolerance * magnitude + 1e-300)


def random(dtype, size, seed):
    rng = np.random.default_rng([size, seed])
    if dtype in ("int8", "uint8", "int32"):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, size, dtype=dtype, endpoint=True)
    x = rng.standard_normal(size)
    if dtype.startswith("complex"):
        x = x + 1j * rng.standard_normal(size)
    return x.astype(jnp.dtype(dtype))


def round_to_tf32(x):
    """To 10 bits of mantissa, ties away from zero."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def wide(x, dtype, tf32=False):
    dtype = jnp.dtype(dtype)
    if dtype.kind == "c":
        re, im = (round_to_tf32(p) if tf32 else p for p in (x.real, x.imag))
        return re.astype(np.float64) + 1j * im.astype(np.float64)
    if dtype.kind in "iu":
        return x.astype(np.float64)  # exact: sums stay far below 2^53
    x = round_to_tf32(x) if tf32 else x
    return x.astype(np.float64)


def skip_without(config):
    reason = _modules.cpu.reject("host", config, query(Call(1, 1, 1)), DEVICE)
    if reason:
        pytest.skip(reason)


DEVICE = {"compute_capability": 0, "num_sms": 0, "shared_memory_bytes": 0}


def query(call):
    """The dictionary that the module's questions take."""
    names = {np.dtype(getattr(jnp, long)): short for short, long in SHORT.items()}
    a, b, d = (names[np.dtype(jnp.dtype(x))] for x in CASES[call.case][:3])
    return call.attributes | {"a_dtype": a, "b_dtype": b, "out_dtype": d}


SHORT = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "s8": "int8",
    "u8": "uint8",
    "s32": "int32",
    "c64": "complex64",
    "c128": "complex128",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_dtype_and_layout(isa, case, layout):
    skip_without(isa)
    for m, n, k in [(1, 1, 1), (3, 17, 63), (65, 3, 257), (63, 65, 17)]:
        Call(m, n, k, case, layout, isa).check()


@pytest.mark.parametrize("case", ["f32", "bf16", "f64", "s8", "c64"])
@pytest.mark.parametrize("m", [1, 2, 5, 14, 17, 257])
def test_odd_shapes(case, m):
    for n in (1, 3, 17, 65, 257):
        for k in (1, 2, 63, 257):
            Call(m, n, k, case).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["f32", "bf16", "f64", "u8_s8", "c128"])
@pytest.mark.parametrize(
    "shape",
    [(600, 40, 10), (40, 1100, 10), (20, 30, 3001), (530, 530, 520)],
    ids=["blocks of rows", "blocks of columns", "depths of K", "blocks and depths"],
)
def test_more_than_one_block(shape, case, layout):
    Call(*shape, case, layout).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["f32", "f16", "bf16", "f64", "s8", "c64"])
@pytest.mark.parametrize("shape", [(1, 700, 900), (700, 1, 900), (1, 1, 5000), (1, 3, 33)])
def test_vectors(shape, case, layout):
    Call(*shape, case, layout).check()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("alpha", "beta"), [(2.0, 0.0), (1.0, 1.0), (-3.0, 2.0), (0.0, 1.0)], ids=str
)
@pytest.mark.parametrize("k", [0, 40, 1500])
def test_alpha_and_beta(case, alpha, beta, k):
    call = Call(19, 37, k, case, alpha=alpha, beta=beta)
    c = random(CASES[case][2], 19 * 37, 3).reshape(call.shape)
    if CASES[case][4] == 0:
        c = c % 1000  # the reference does not wrap
    call.check(c if beta else None)


def test_fractional_alpha():
    call = Call(9, 9, 9, alpha=0.1, beta=-0.7)
    call.check(random("float32", 81, 3).reshape(call.shape))


@pytest.mark.parametrize("case", CASES)
def test_no_terms_give_zero(case):
    got = Call(5, 70, 0, case).run()
    np.testing.assert_array_equal(got, np.zeros((1, 5, 70), got.dtype))


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (0, 0, 0)])
def test_empty_matrices(shape):
    assert Call(*shape).run().shape == (1, *shape[:2])


def test_empty_batch():
    assert Call(3, 4, 5, batch=(0, 1)).run().shape == (0, 3, 4)


@pytest.mark.parametrize("case", ["f32", "bf16", "s8", "c64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch(case, layout):
    Call(5, 7, 9, case, layout, batch=(1, 300)).check()
    Call(70, 90, 30, case, layout, batch=(2, 3)).check()


@pytest.mark.parametrize(
    ("a_strides", "b_strides"),
    [
        ((0, 0), (0, 0)),
        ((0, 7 * 9), (9 * 5, 0)),
        ((7 * 9, 0), (0, 9 * 5)),
        ((3, 1000), (500, 1)),
    ],
    ids=["both broadcast", "crossed", "crossed back", "overlapping"],
)
def test_batch_strides(a_strides, b_strides):
    Call(7, 5, 9, batch=(3, 4), a_strides=a_strides, b_strides=b_strides).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["f32", "f16", "u8", "c128"])
def test_leading_dimensions(case, layout):
    Call(20, 35, 50, case, layout, a_ld=61, b_ld=83, batch=(1, 2)).check()


@pytest.mark.parametrize("config", ["auto", *ISAS])
@pytest.mark.parametrize("case", ["f32", "f16", "bf16", "tf32", "f64"])
def test_nan_and_infinity_spread_along_their_row(config, case):
    skip_without(config)
    for value in (np.nan, np.inf):
        call = Call(20, 40, 70, case, config=config)
        a, b = (np.array(x) for x in call.operands)
        a[3 * 70 + 11] = value
        b[:] = np.abs(np.where(b == 0, b.dtype.type(1), b))
        d = wide(call.run(a, b), CASES[case][2])
        np.testing.assert_array_equal(d[0, 3], np.full(40, value))
        assert np.isfinite(np.delete(d[0], 3, axis=0)).all()


def test_infinity_times_zero_is_nan():
    call = Call(1, 40, 2)
    a, b = np.array([np.inf, 1], np.float32), np.zeros(80, np.float32)
    assert np.isnan(call.run(a, b)).all()


@pytest.mark.parametrize("config", ["auto", *ISAS])
def test_every_float16_survives(config):
    """A product with the identity returns every float16 as it was: subnormals, infinities."""
    skip_without(config)
    bits = np.arange(2**16, dtype=np.uint16)
    x = bits.view(np.float16)
    finite = np.isfinite(x)
    for start in range(0, 2**16, 2**12):
        part = x[start : start + 2**12]
        d = Call(2**12, 1, 1, "f16", config=config).run(part, np.ones(1, np.float16)).reshape(-1)
        keep = finite[start : start + 2**12]
        np.testing.assert_array_equal(d[keep], part[keep])
        np.testing.assert_array_equal(d[~keep], part[~keep])


@pytest.mark.parametrize("config", ["auto", *ISAS])
@pytest.mark.parametrize("case", ["f32_f16", "f32_bf16"])
def test_rounding_to_half_is_to_nearest_even(config, case):
    skip_without(config)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 40000, dtype=np.uint32).view(np.float32)
    near_half = rng.standard_normal(40000) * np.exp2(rng.integers(-30, 18, 40000))
    x = np.concatenate([x, near_half.astype(np.float32), np.float32([65504, 65519.996, 65520])])
    x = x[~(np.abs(x) < np.finfo(np.float32).tiny)]  # XLA may flush what float32 cannot hold
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(jnp.dtype(CASES[case][2]))
    got = Call(x.size, 1, 1, case, config=config).run(x, np.ones(1, np.float32)).reshape(-1)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_beta_zero_ignores_c():
    """A C that is there although beta == 0 is not read."""
    call = Call(9, 9, 9, beta=0.0)
    got = call.run(*call.operands, np.full(call.shape, np.nan, np.float32))
    np.testing.assert_array_equal(got, call.run())


def test_c_may_be_the_memory_of_d():
    for case in ("f32", "bf16", "c64"):
        call = Call(40, 70, 1500, case, beta=1.0)
        c = random(CASES[case][2], 40 * 70, 3).reshape(call.shape)
        result = jax.ShapeDtypeStruct(c.shape, c.dtype)
        aliased = jax.ffi.ffi_call("tcgemm_gemm", result, input_output_aliases={2: 0})
        attributes = call.attributes
        run = jax.jit(lambda a, b, c, f=aliased, g=attributes: f(a, b, c, gemm=g), donate_argnums=2)
        got = run(*(jnp.asarray(x) for x in call.operands), jnp.array(c))
        np.testing.assert_array_equal(got, call.run(*call.operands, c))


@pytest.mark.parametrize("case", ["f32", "bf16", "f64", "c64"])
def test_repeats_are_bitwise_equal(case):
    call = Call(200, 300, 1500, case)
    first = call.run()
    for _ in range(5):
        np.testing.assert_array_equal(call.run().view(np.uint8), first.view(np.uint8))


@pytest.mark.parametrize("case", ["f32", "bf16", "s8", "c64"])
def test_an_item_does_not_depend_on_its_batch(case):
    """The order of summation is fixed by the product alone, not by what runs beside it."""
    batched = Call(64, 300, 1500, case, batch=(1, 6), a_strides=(0, 0), b_strides=(0, 0)).run()
    alone = Call(64, 300, 1500, case)
    alone = alone.run(
        *Call(64, 300, 1500, case, batch=(1, 6), a_strides=(0, 0), b_strides=(0, 0)).operands
    )
    for item in batched:
        np.testing.assert_array_equal(item, alone[0])


@pytest.mark.parametrize("isa", ISAS)
def test_int32_sums_wrap(isa):
    skip_without(isa)
    k = 2**17 + 3
    for case, x, y in [("s8", -128, -128), ("u8", 255, 255), ("s8_u8", -128, 255)]:
        a, b, d, *_ = CASES[case]
        got = Call(1, 2, k, case, config=isa).run(np.full(k, x, a), np.full(2 * k, y, b))
        want = np.array(x * y * k, np.int64).astype(d)
        np.testing.assert_array_equal(got, np.full((1, 1, 2), want))


def test_concurrent_calls():
    calls = [Call(m, 90, 400, case) for m in (1, 33, 250) for case in ("f32", "bf16", "s8", "c64")]
    want = [call.run() for call in calls]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for got, expected in zip(pool.map(Call.run, calls), want, strict=True):
                np.testing.assert_array_equal(got, expected)


HUGE = 2**62

MALFORMED = {
    "abi": ({"abi": 0}, "ABI version 0"),
    "implementation": ({"implementation": "nosuch"}, "implementation nosuch is not part of"),
    "config": ({"config": "nosuch"}, "host has no config nosuch"),
    "unknown compute": ({"compute": "f8"}, "compute must be f16, f32, tf32, f64 or s32, got f8"),
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
    assert _modules.cpu.reject("host", "auto", problem, DEVICE) == ""
    assert reason in _modules.cpu.reject("host", "auto", problem | changes, DEVICE)


def test_configs():
    assert _modules.cpu.implementations() == {"host": ["auto", *ISAS]}
    assert _modules.cpu.reject("host", "portable", query(Call(1, 1, 1)), DEVICE) == ""
