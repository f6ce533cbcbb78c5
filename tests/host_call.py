"""Calls of the FFI target on the host, below the public functions, and their float64 references.

A call is made as a lowered program would make it, so that attributes no Python function produces
are met too.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.function import Numbers
from jax_tcgemm.system import modules

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

    @functools.cached_property
    def c(self):
        """C in memory where beta asks for it; integers small enough for sums not to wrap."""
        if not self.beta:
            return None
        c = random(CASES[self.case][2], self.m * self.n, 3).reshape(self.shape)
        return c % 1000 if CASES[self.case][4] == 0 else c

    @property
    def all_operands(self):
        return [*self.operands, *([] if self.c is None else [self.c])]

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
            "abi": modules.cpu.abi_version,
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
            "scales": Numbers.of([]),
            "symmetric": False,
            **Epilogue().attributes(),
            **dict(self.overrides),
        }

    def bind(self, *operands, shape=None, **options):
        """The call in a program."""
        shape = self.shape if shape is None else shape
        result = jax.ShapeDtypeStruct(shape, CASES[self.case][2])
        return jax.ffi.ffi_call("tcgemm_gemm", result, **options)(*operands, gemm=self.attributes)

    def run(self, *operands, shape=None):
        """Runs the call on its own operands or on those given."""
        program = jax.jit(functools.partial(self.bind, shape=shape))
        return np.asarray(program(*(jnp.asarray(x) for x in operands or self.all_operands)))

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

    def reference(self):
        """The result and, for each element, the sum of the magnitudes that went into it."""
        a, b = self.matrices(0), self.matrices(1)
        d, magnitude = a @ b * self.alpha, np.abs(a) @ np.abs(b) * abs(self.alpha)
        if self.c is not None:
            c = wide(self.c, self.c.dtype)
            d, magnitude = d + c * self.beta, magnitude + np.abs(c * self.beta)
        return d, magnitude

    def check(self):
        """Asserts that the call gives what it should."""
        self.compare(self.run())

    def compare(self, got):
        """Asserts that this is what the call should give."""
        want, magnitude = self.reference()
        tolerance = CASES[self.case][4]
        if tolerance == 0:
            np.testing.assert_array_equal(got, want.astype(np.int64).astype(np.int32))
        else:
            got = wide(got, got.dtype)
            assert got.shape == want.shape
            # An element of a complex product is made of four real ones.
            np.testing.assert_array_less(np.abs(got - want), tolerance * magnitude + 1e-300)


def check_all(calls):
    """Asserts that calls give what they should; one program, which is compiled once, runs all."""

    @jax.jit
    def program(operands):
        return [call.bind(*own) for call, own in zip(calls, operands, strict=True)]

    results = jax.device_get(program([call.all_operands for call in calls]))
    for call, got in zip(calls, results, strict=True):
        call.compare(got)


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


DEVICE = {
    "compute_capability": 0,
    "num_sms": 0,
    "shared_memory_bytes": 0,
    "compiles_kernels": False,
}


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
