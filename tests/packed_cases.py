"""Products with packed weights for tests: random weights and what float64 makes of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_tcgemm
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.operands.packed import PackedProblem
from jax_tcgemm.problem.operands.packed_weight import CODINGS, E2M1, FLOAT8_NAMES, NF4
from jax_tcgemm.selection import implementations
from jax_tcgemm.selection.configs import WidePackedConfig, parse_or_none
from jax_tcgemm.selection.devices import ASSUMED_GPU

TABLES = {"nf4": NF4, "float4_e2m1fn": E2M1}
# One program for each, where operation by operation dozens are compiled.
_pack = jax.jit(jax_tcgemm.pack_weights, static_argnames=("group_size", "dtype"))
unpack = jax.jit(jax_tcgemm.PackedWeight.unpack)
dequantize = jax.jit(jax_tcgemm.PackedWeight.dequantize, static_argnames="dtype")


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of m rows, or of those of experts of these sizes.

    Integers of qtypes "nf4" and "float4_e2m1fn" stand for values of a table. x of "f8e4m3fn" has a
    scale for each row.

    From number `offset` on, `experts` of them have weights; None: all.
    """

    m: int
    n: int
    k: int
    group: int | None = 128
    qtype: str = "int4"
    zeros: bool = False
    scale: str = "bf16"
    x: str = "bf16"
    out: str = "f32"
    sizes: tuple[int, ...] = ()
    offset: int = 0
    experts: int | None = None
    positive: bool = False  # x
    columns: bool = False  # column scales

    @property
    def label(self):
        words = [f"{self.m}x{self.n}x{self.k}", self.qtype, f"g{self.group}"]
        words += ["zeros"] * self.zeros + ["positive"] * self.positive
        words += ["columns"] * self.columns
        if self.sizes:
            words.append(f"experts{self.offset}+{self.num_weights}of{len(self.sizes)}")
        return "_".join([*words, self.scale, self.x, self.out])

    @property
    def has_row_scales(self):
        return self.x == "f8e4m3fn"

    @property
    def num_weights(self):
        return (len(self.sizes) if self.experts is None else self.experts) or 1

    @property
    def code(self):
        """The field `code` of the problem."""
        if "float" in self.qtype:
            return self.qtype
        return "table" if self.qtype in TABLES else "integer"

    @property
    def coding(self):
        return CODINGS["table" if self.qtype in TABLES else self.qtype]

    @functools.cached_property
    def _drawn(self):
        rng = np.random.default_rng([self.m, self.n, self.k, len(self.label)])
        coding = self.coding
        groups = self.k // (self.group or self.k)
        experts = (self.num_weights,) if self.sizes else ()
        shape = (*experts, self.k, self.n)
        q = rng.integers(coding.least, coding.largest + 1, shape)
        if self.qtype in FLOAT8_NAMES:  # subnormal numbers, too
            q = rng.standard_normal(shape) * 2.0 ** rng.integers(-16, 5, shape)
            q = q.astype(self.qtype)
        # So different that a scale of a neighbor shows.
        shape = (*experts, groups, self.n)
        scale = rng.uniform(0.25, 4, shape) * rng.choice([-1, 1], shape)
        if self.scale == "f8e8m0fnu":
            scale = 2.0 ** rng.integers(-2, 2, shape)
            if self.x == "bf16":  # Columns of every second pair of tiles have large scales.
                scale[..., np.arange(self.n) // 32 % 2 == 1] *= 2.0**16
        zero_point = None
        if self.zeros:
            zero_point = rng.integers(coding.least, coding.largest + 2, shape)
        x = rng.standard_normal((self.m, self.k))
        x = abs(x) if self.positive else x
        return q, scale.astype(DTYPES[self.scale]), zero_point, x.astype(DTYPES[self.x])

    @functools.cached_property
    def row_scales(self):
        rng = np.random.default_rng(self.m)
        return rng.uniform(0.25, 4, self.m).astype(np.float32)

    @functools.cached_property
    def column_scale(self):
        if not self.columns:
            return None
        experts = (self.num_weights,) if self.sizes else ()
        rng = np.random.default_rng(self.n)
        return rng.uniform(0.25, 4, (*experts, self.n)).astype(np.float32)

    @functools.cached_property
    def weight(self):
        q, scale, zero_point, _ = self._drawn
        arrays = (jnp.asarray(x) for x in (q, scale))
        zero_point = None if zero_point is None else jnp.asarray(zero_point)
        how = {"group_size": self.group, "dtype": self.qtype, "column_scale": self.column_scale}
        return _pack(*arrays, zero_point, **how)

    @property
    def x_array(self):
        return self._drawn[3]

    @property
    def lhs(self):
        """x as a product takes it: of 8-bit floats quantized rows."""
        x = jnp.asarray(self.x_array)
        if not self.has_row_scales:
            return x
        return jax_tcgemm.QuantizedArray(x, jnp.asarray(self.row_scales[:, None]))

    @functools.cached_property
    def exact_weight(self):
        """In float64; of a table its values as the kernel has them, in the dtype of x."""
        return self._with_column_scales(self._weight_of_groups)

    @functools.cached_property
    def _weight_of_groups(self):
        q, scale, zero_point, _ = self._drawn
        size = self.group or self.k
        values = q.astype(np.float64)
        if self.qtype in TABLES:
            values = np.array(TABLES[self.qtype]).astype(DTYPES[self.x]).astype(np.float64)[q]
        if zero_point is not None:
            values = values - zero_point.repeat(size, -2)
        return values * scale.astype(np.float64).repeat(size, -2)

    def _with_column_scales(self, values):
        return (
            values * self.column_scale.astype(np.float64)[..., None, :] if self.columns else values
        )

    @functools.cached_property
    def exact(self):
        """The product, and that of magnitudes."""
        return self._exact_of(self.exact_weight)

    @functools.cached_property
    def exact_of_dequantized(self):
        """The same of the weight rounded to the dtype of x before column scales."""
        w = self._weight_of_groups.astype(np.float32).astype(DTYPES[self.x]).astype(np.float64)
        return self._exact_of(self._with_column_scales(w))

    def _exact_of(self, w):
        x = self.x_array.astype(np.float64)
        if self.has_row_scales:
            x = x * self.row_scales[:, None].astype(np.float64)
        if not self.sizes:
            return x @ w, abs(x) @ abs(w)
        product, magnitude = np.zeros((2, self.m, self.n))
        ends = np.minimum(np.cumsum(np.maximum(self.sizes, 0)), self.m)
        for expert, own in enumerate(w):
            rows = slice(*np.append(0, ends)[self.offset + expert : self.offset + expert + 2])
            product[rows], magnitude[rows] = x[rows] @ own, abs(x[rows]) @ abs(own)
        return product, magnitude

    @property
    def groups(self):
        """Sizes and offset, as a call has them."""
        return np.array(self.sizes, np.int32), np.array([self.offset], np.int32)

    @property
    def problem(self):
        coding = self.coding
        return PackedProblem(
            form="grouped" if self.sizes else "product",
            m=self.m,
            n=-(-self.n // 16) * 16,
            k=self.k,
            group_size=self.group or self.k,
            bits=coding.bits,
            code=self.code,
            zero=0 if self.zeros or self.code != "integer" else coding.offset,
            zero_points=self.zeros,
            scale=self.scale,
            in_dtype=self.x,
            out_dtype=self.out,
            experts=self.num_weights,
            num_sizes=len(self.sizes),
            column_scales=self.columns,
        )

    @property
    def weight_problem(self):
        """That of the weight as an array, in the dtype of x."""
        own = {"form": "weight", "m": 0, "out_dtype": self.x, "experts": 1, "num_sizes": 0}
        columns = self.num_weights * self.problem.n
        return dataclasses.replace(self.problem, **own, n=columns)

    @property
    def exact_rows(self):
        """What that gives, from float32."""
        w = np.asarray(self.weight.dequantize(jnp.float32))
        return np.swapaxes(w, -1, -2).astype(DTYPES[self.x])

    @property
    def weight_arrays(self):
        """The operands of that, by name."""
        return {name: x for name, x in self.arrays.items() if name not in ("x", "row_scales")}

    @property
    def arrays(self):
        """The operands of a product, by name."""
        w = self.weight
        found = {"x": self.x_array}
        if self.has_row_scales:
            found["row_scales"] = self.row_scales
        found |= {"values": np.asarray(w.values), "scales": np.asarray(w.scales)}
        if w.zero_points is not None:
            found["zero_points"] = np.asarray(w.zero_points)
        if w.column_scales is not None:
            found["column_scales"] = np.asarray(w.column_scales)
        if w.format.has_lookup:
            found["table"] = np.array(w.format.table, np.float32)
        if self.sizes:
            found["group_sizes"], found["group_offset"] = self.groups
        return found

    def mismatch(self, got, rounding=1e-6, *, dequantizes=False) -> str:
        """How a result is wrong, "" where it is not.

        Sums in float32 are off by `rounding` of what was added up, those of 8-bit floats by what
        tensor cores cut off after each 32 of 128 of K, and the result is rounded once.
        `dequantizes`: the weight is rounded to the dtype of x first, as it is with groups of 16.
        """
        dequantizes = dequantizes or self.group == 16
        rounding = max(rounding, 2**-11 * self.has_row_scales)
        exact, magnitude = self.exact_of_dequantized if dequantizes else self.exact
        got = np.asarray(got).astype(np.float64)[:, : self.n]
        rounded = {"f32": 2**-23, "bf16": 2**-8, "f16": 2**-11}[self.out]
        # What nothing was added up in is exactly zero.
        bound = rounding * magnitude + rounded * abs(exact) + 1e-7 * (magnitude > 0)
        wrong = ~(abs(got - exact) <= bound)
        if not wrong.any():
            return ""
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        return (
            f"{self.label}: {wrong.sum()} of {wrong.size} are wrong, the first at {where}: "
            f"{got[where]} instead of {exact[where]} +- {bound[where]}"
        )


# What decides how many registers a kernel takes.
_FORMATS = (
    {"group": 128},
    {"group": 64, "zeros": True},
    {"group": 32, "scale": "f32"},
    {"group": 32, "zeros": True, "qtype": "uint4", "scale": "f16", "x": "f16"},
    {"group": 64},
    {"group": 64, "qtype": "int8", "scale": "f32"},
    {"group": 32, "qtype": "int8", "x": "f16"},
    {"group": 128, "qtype": "int8"},
    {"group": 128, "qtype": "int8", "zeros": True, "x": "f16"},
    {"group": 32, "qtype": "uint8", "zeros": True, "scale": "f32"},
    {"group": None, "qtype": "int8", "x": "f16"},
    {"group": None, "zeros": True},
    {"group": 64, "qtype": "nf4", "scale": "f32"},
    {"group": 32, "qtype": "nf4", "x": "f16"},
    {"group": 32, "qtype": "float4_e2m1fn", "scale": "f8e8m0fnu"},
    {"group": 16, "qtype": "float4_e2m1fn", "scale": "f8e4m3fn", "columns": True},
    {"group": 32, "qtype": "float8_e4m3fn", "scale": "f8e8m0fnu"},
    {"group": 128, "x": "f8e4m3fn"},
    {"group": 32, "zeros": True, "scale": "f32", "x": "f8e4m3fn"},
    {"group": None, "qtype": "uint4", "x": "f8e4m3fn"},
)


# Of sums by tensor cores, which cut off what does not fit one, relative to |x| |w|.
ROUNDING = 4e-6


def configs_of(case, device):
    """Those that a device runs a product by."""
    names = implementations.configs_of("packed", "packed")
    found = implementations.considered("packed", names, case.problem, device)
    return [candidate.config for candidate in found if not candidate.reason]


def instances(config, case):
    """The kernels that a product brings, that which multiplies before others."""
    candidate = implementations.Candidate("packed", config, "")
    return implementations.kernels(candidate, case.problem, ASSUMED_GPU)


def weight_instances(case):
    """The kernels that write the weight as an array."""
    candidate = implementations.Candidate("packed", "128x2_c1", "")
    return implementations.kernels(candidate, case.weight_problem, ASSUMED_GPU)


def dequantizes(config: str) -> bool:
    """Whether a config of packed rounds the weight to the dtype of x."""
    return is_wide(config) and parse_or_none(config).dequantizes


def is_wide(config: str) -> bool:
    """Whether a config of packed multiplies by wgmma."""
    return isinstance(parse_or_none(config), WidePackedConfig)


def all_packed():
    """Every config with every number of rows that it knows, for some formats."""
    found = {}
    cases = [
        Case(rows, 16, 256, **how, sizes=sizes)
        for rows in (8, 16, 32)
        for how in _FORMATS
        for sizes in ((), (rows // 2, rows // 2))
    ]
    names = implementations.configs_of("packed", "packed")
    for case in cases if names else ():
        for candidate in implementations.considered("packed", names, case.problem, ASSUMED_GPU):
            # Of those of wgmma the config alone says how many rows there are.
            is_known = is_wide(candidate.config) and case.m > 8
            if not candidate.reason and not is_known:
                instance, *others = instances(candidate.config, case)
                found[f"packed_{candidate.config}_{case.label}"] = instance
                found |= {f"packed_order_{case.x}": other for other in others}
    return found
