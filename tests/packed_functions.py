"""Products with packed weights and functions as their epilogues, for tests: exact in float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from packed_cases import Case, instances

from jax_tcgemm.device.fusion import packed
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.operands.packed_weight import CODINGS
from jax_tcgemm.selection.devices import ASSUMED_GPU

BF16, F32, BOOL = (np.dtype(x) for x in (jnp.bfloat16, np.float32, np.bool_))


@dataclasses.dataclass(frozen=True)
class Exact(Case):
    """A case of small whole numbers, whose sums are exact in float32 and in tensor cores."""

    @functools.cached_property
    def _drawn(self):
        rng = np.random.default_rng([self.m, self.n, self.k])
        coding = CODINGS[self.qtype]
        groups = self.k // (self.group or self.k)
        experts = (self.num_weights,) if self.sizes else ()
        of_scales = (*experts, groups, self.n)
        q = rng.integers(coding.least, min(coding.largest, 15) + 1, (*experts, self.k, self.n))
        scale = rng.choice([-2, -1, 0.5, 1], of_scales).astype(DTYPES[self.scale])
        zero_point = rng.integers(0, 4, of_scales) if self.zeros else None
        x = rng.integers(-2, 3, (self.m, self.k)).astype(DTYPES[self.x])
        return q, scale, zero_point, x

    @functools.cached_property
    def row_scales(self):
        return np.random.default_rng(self.m).choice([0.5, 1, -2], self.m).astype(np.float32)

    @property
    def numbers_of_rows(self):
        """For each row the number of its expert among the weights, -1 where there is none."""
        number = np.full(self.m, -1)
        ends = np.minimum(np.cumsum((0, *self.sizes)), self.m)[self.offset :]
        for expert in range(self.num_weights if self.sizes else 0):
            number[ends[expert] : ends[expert + 1]] = expert
        return number


def everything(acc, scale, bias, column, residual, flag):
    """Three results, of three widths, from operands of every kind and both indices."""
    z = acc * scale + bias + column
    y = jnp.where(flag, z, -z) + residual
    i, j = (jax.lax.broadcasted_iota(jnp.int32, acc.shape, d) for d in (0, 1))
    kept = jnp.where((i + j) % 3 == 0, 1, y).astype(jnp.bfloat16)
    return kept, (jnp.clip(z, -20, 20) * 4).astype(jnp.int8), (y + 1).astype(jnp.float32)


def layer(acc, bias):
    """What most layers are."""
    return (jnp.maximum(acc, 0) + bias).astype(jnp.bfloat16)


def reductions(acc, bias):
    """The largest of each row, sums of columns, and the sums themselves."""
    z = acc + bias
    return z.max(-1), z.sum(0), z.astype(jnp.bfloat16)


def gate(acc, up, bias, residual):
    """A gated layer, and a truth value."""
    kept = jnp.where(acc > 0, acc, 0) * up + bias
    return kept.astype(jnp.float32) + residual, (up - acc) >= 0


def two(acc, up):
    """Both side by side in one array, as derivatives of gates are."""
    return jnp.stack([(acc * 2).astype(jnp.bfloat16), (up + 1).astype(jnp.bfloat16)], 1)


def by_expert(acc, bias, factor, residual, row):
    """A layer with a bias and a factor of each expert, two results, and the number of a row."""
    z = (acc + bias) * factor + row
    i = jax.lax.broadcasted_iota(jnp.int32, acc.shape, 0)
    return (z + residual).astype(jnp.bfloat16), jnp.where(i % 2 == 0, z, 1).astype(jnp.float32)


def gate_by_expert(acc, up, bias, bias_up, residual):
    """A gated layer with biases of each expert, and a truth value."""
    kept = jnp.where(acc + bias > 0, acc + bias, 1) * (up + bias_up)
    return kept.astype(jnp.float32) + residual, (up - acc) >= 0


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of a product; `kinds` of its operands and their dtypes.

    Kinds are "1", "n", "m1" and "mn", and of operands held by group "g1" and "gn".
    """

    case: Exact
    function: object
    kinds: tuple[tuple[str, np.dtype], ...] = ()
    gated: bool = False

    @property
    def shape(self):
        """That of an accumulator."""
        return self.case.m, self.case.n // (2 if self.gated else 1)

    @functools.cached_property
    def operands(self):
        """Those of the function."""
        rng, (m, n) = np.random.default_rng(len(self.kinds)), self.shape
        shapes = {"1": (), "n": (n,), "m1": (m, 1), "mn": (m, n)}
        shapes |= {"g1": (self.case.num_weights, 1, 1), "gn": (self.case.num_weights, 1, n)}
        numbers = [(rng.integers(-3, 4, shapes[kind]), dtype) for kind, dtype in self.kinds]
        return [x % 2 == 0 if dtype == BOOL else np.asarray(x, dtype) for x, dtype in numbers]

    @property
    def by_group(self):
        """For each operand, whether it is held by group."""
        return tuple(kind.startswith("g") for kind, _ in self.kinds)

    @functools.cached_property
    def given(self):
        """What the function is given: of an operand by group, for each row that of its group."""
        numbers = self.case.numbers_of_rows
        return [
            np.where(numbers[:, None] < 0, np.zeros((), x.dtype), x[numbers, 0]) if own else x
            for x, own in zip(self.operands, self.by_group, strict=True)
        ]

    @functools.cached_property
    def folded(self):
        """The problem, which operands it takes, and what it was made of."""
        accs = [jax.ShapeDtypeStruct(self.shape, F32)] * (2 if self.gated else 1)
        jaxpr = jax.make_jaxpr(lambda *x: jax.tree.leaves(self.function(*x)))(*accs, *self.given)
        shapes = tuple(x.shape for x in self.operands)
        product = packed.Product(
            *(CallOptions("matmul"), self.case.weight.format, self.case.problem, jaxpr),
            *(self.shape, 1, shapes, self.gated, False, self.by_group),
        )
        found = product.folded(ASSUMED_GPU)
        assert not isinstance(found, str), found
        return found.problem, found.operands, product

    @property
    def problem(self):
        """The problem with the function."""
        return self.folded[0]

    def kernels(self, config):
        """The kernels that the call brings, that which multiplies before others."""
        return instances(config, self)

    @property
    def weight(self):
        """The weight, of a gated product (k, 2, n)."""
        w = self.case.weight
        if not self.gated:
            return w
        form = dataclasses.replace(w.format, shape=(self.case.k, 2, self.shape[1]))
        return dataclasses.replace(w, format=form)

    def check(self, found, what=""):
        """Raises AssertionError unless results are the function's of exact products."""
        product, _ = self.case.exact
        accs = np.split(product, 2, 1) if self.gated else [product]
        accs = [jnp.asarray(acc, np.float32) for acc in accs]
        expected = jax.tree.leaves(self.function(*accs, *map(jnp.asarray, self.given)))
        if self.case.sizes:
            is_there = self.case.numbers_of_rows[:, None] >= 0
            expected = [jnp.where(is_there, y, jnp.zeros((), y.dtype)) for y in expected]
        for number, (own, other) in enumerate(zip(found, expected, strict=True)):
            assert own.dtype == other.dtype
            if not np.array_equal(np.asarray(own), np.asarray(other)):
                raise AssertionError(f"{what}: result {number} is wrong")


ALL = (("1", F32), ("n", BF16), ("m1", F32), ("mn", BF16), ("mn", BOOL))
BIAS, GATE = (("n", F32),), (("n", BF16), ("mn", F32))
BY_EXPERT = ("gn", BF16), ("g1", F32), ("mn", BF16), ("m1", F32)
GATE_BY_EXPERT = ("gn", BF16), ("gn", F32), ("mn", F32)
# Experts without rows, and rows that fill no tile; rows of no expert follow, or come before.
UNEVEN = (3, 0, 17, 1, 0, 0, 8, 0)
# A config and the call that it runs: shares of a cluster's blocks of one to four times eight
# columns, rows and columns that fill no tile, all formats of scales.
CASES = {
    "everything": ("128x2_c1", Call(Exact(11, 208, 512), everything, ALL)),
    "share": ("128x2_c8", Call(Exact(5, 144, 2560, 64, "int8"), everything, ALL)),
    "whole rows": ("256x2_c2", Call(Exact(16, 512, 512), layer, BIAS)),
    "reductions": ("64x4_c2", Call(Exact(20, 160, 1024), reductions, BIAS)),
    "gated": (
        "128x2_c8",
        Call(Exact(9, 288, 2560, 32, "uint4", zeros=True), gate, GATE, gated=True),
    ),
    "columns": (
        "256x2_c1",
        Call(Exact(3, 320, 512, None, "uint4", zeros=True), gate, GATE, gated=True),
    ),
    "two": ("64x4_c1", Call(Exact(8, 192, 512), two, gated=True)),
    "wide": ("w128x64_c2", Call(Exact(70, 144, 1152), everything, ALL)),
    "wide reductions": ("w128x96_c1", Call(Exact(100, 160, 256), reductions, BIAS)),
    "wide gated": (
        "w128x64_c4",
        Call(Exact(40, 160, 1152, 64, "int4", zeros=True), gate, GATE, gated=True),
    ),
    "wide columns": (
        "w128x64_m2",
        Call(Exact(30, 544, 512, None, "uint4", zeros=True), gate, GATE, gated=True),
    ),
    "experts": (
        "128x2_c1",
        Call(Exact(40, 144, 640, 64, "int4", zeros=True, sizes=UNEVEN), by_expert, BY_EXPERT),
    ),
    "gated experts": (
        "128x2_c4",
        Call(
            Exact(29, 160, 1600, 32, "uint4", zeros=True, sizes=UNEVEN, offset=2, experts=3),
            *(gate_by_expert, GATE_BY_EXPERT, True),
        ),
    ),
    "wide experts": (
        "w128x64_c2",
        Call(Exact(150, 144, 1152, sizes=(70, 0, 9, 40)), by_expert, BY_EXPERT),
    ),
    "wide gated experts": (
        "w128x64_m2",
        Call(
            Exact(100, 288, 512, 64, "int4", zeros=True, sizes=(9, 66, 0, 3), offset=1, experts=3),
            *(gate_by_expert, GATE_BY_EXPERT, True),
        ),
    ),
    "dequantizing": ("d128x128_c2", Call(Exact(70, 144, 576, 32), everything, ALL)),
    "dequantizing reductions": ("d128x128_c1", Call(Exact(100, 160, 256), reductions, BIAS)),
    "dequantizing gated": (
        "d128x160_c1",
        Call(Exact(140, 288, 192, 64, "int4", zeros=True), gate, GATE, gated=True),
    ),
    "dequantizing gated experts": (
        "d128x128_c1",
        Call(
            Exact(100, 288, 256, 64, "int4", zeros=True, sizes=(9, 66, 0, 3), offset=1, experts=3),
            *(gate_by_expert, GATE_BY_EXPERT, True),
        ),
    ),
    "float8": ("w128x64_c1", Call(Exact(70, 144, 512, x="f8e4m3fn"), layer, BIAS)),
}
