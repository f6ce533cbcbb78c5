"""Gated grouped products of 8 bits, of floats with block scales and without, emulated."""

import dataclasses
import functools
import math

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference
from emulated import Emulator, carried
from emulated_checks import group_arrays
from kernel_instances import wgmma_ragged
from mistakes import Mistake
from mutants import WRONG, mutants

from jax_tcgemm import selection
from jax_tcgemm.device.fusion import fused
from jax_tcgemm.kernels import nvrtc
from jax_tcgemm.primitives import epilogue_product
from jax_tcgemm.primitives.encodings.ragged import Ragged
from jax_tcgemm.primitives.encodings.ragged_block_scaled import RaggedBlockScaled
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPES

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

CONFIG, ARGUMENTS = "256x128x64_c1x2x1_co_t", "256, 128, 1, 2, 1, false, true"
# Widths of both blocks of a cluster, more than one tile, an empty group; and tokens of no group.
SIZES, LEFT_OVER = [3, 0, 140, 300], 20


def layer(gate, up, bias, scale):
    """Two results, of a value for each column and of one for each group."""
    gate, up = (x.astype(jnp.float32) for x in (gate, up))
    return (jnp.maximum(gate + bias, 0) * up * scale).astype(jnp.bfloat16), up >= gate


@dataclasses.dataclass(frozen=True)
class Case:
    """A product, or one for each entry of the batch ().

    `blocks`: of what rows and how much of K there is a scale, of either operand.
    """

    blocks: tuple[tuple[int, int], tuple[int, int]] | None
    dtype: str = "f8e4m3fn"
    n: int = 200
    k: int = 400
    sizes: tuple[int, ...] = tuple(SIZES)
    batch: tuple[int, ...] = ()

    @property
    def extents(self):
        return sum(self.sizes) + LEFT_OVER, len(self.sizes)

    @functools.cached_property
    def scale_shapes(self):
        if self.blocks is None:
            return ()
        (rows, depth), (columns, other_depth) = self.blocks
        m, groups = self.extents
        a = -(-m // rows), -(-self.k // depth)
        b = groups, 2, -(-self.n // columns), -(-self.k // other_depth)
        return (*self.batch, *a), (*self.batch, *b)

    @functools.cached_property
    def plan(self) -> fused.Plan:
        m, groups = self.extents
        dtype, i32, f32, batch = DTYPES[self.dtype], jnp.int32, jnp.float32, self.batch
        shapes = ((*batch, m, self.k), dtype), ((*batch, groups, self.k, 2, self.n), dtype)
        shapes += ((*batch, groups), i32), ((*batch, 1), i32)
        shapes += *((x, f32) for x in self.scale_shapes), ((self.n,), f32)
        types = [jax.ShapeDtypeStruct(*x) for x in (*shapes, ((*batch, groups, 1, 1), f32))]
        acc = jax.ShapeDtypeStruct((*batch, m, self.n), i32 if self.dtype == "s8" else f32)
        of_rows = jax.ShapeDtypeStruct((*batch, m, 1), f32)
        how = {"gated": True, "by_group": (False, True)}
        encoding = Ragged(groups, acc.dtype, **how)
        if self.blocks is not None:
            encoding = RaggedBlockScaled(groups, blocks=self.blocks, **how)
        params = {
            "options": CallOptions("gated_ragged_linear", "wgmma", CONFIG),
            "in_place": None,
            "encoding": encoding,
            "function": jax.make_jaxpr(layer)(acc, acc, types[-2], of_rows),
        }
        product = epilogue_product.product_of(*types, params)
        return fused.make_plan(product, selection.target_device("cuda"))

    @property
    def kernel(self):
        function = self.plan.problem.function
        rows = (0, 0)
        if self.blocks is not None:
            rows = 64 if self.blocks[1][0] % 64 == 0 else 1, 1
        struct = f"Function<tcgemm::elementwise::{function.name}>"
        types = f"{self.dtype},{self.dtype}"
        own = wgmma_ragged(ARGUMENTS, struct, types, scaled_rows=rows)
        return dataclasses.replace(own, definitions=function.definitions)

    def check(self, emulator, seed=0):
        """Both results; scales are powers of two, by which sums of integers stay exact."""
        rng, plan, (m, groups) = np.random.default_rng(seed), self.plan, self.extents
        a = rng.integers(-3, 4, (*self.batch, m, self.k))
        b = rng.integers(-3, 4, (*self.batch, groups, 2, self.n, self.k))
        tokens = a.astype(DTYPES[self.dtype])
        tokens[..., sum(self.sizes) :, :] = 99 if self.dtype == "s8" else np.nan
        number, used = math.prod(self.batch), sum(self.sizes)
        of_groups = {name: np.tile(x, number) for name, x in group_arrays(self.sizes).items()}
        arrays = {"a": tokens, "b": b.astype(DTYPES[self.dtype]), **of_groups}
        wide = [x.astype(np.float64) for x in (a, b)]
        scales = [jnp.float32(2.0 ** rng.integers(-1, 2, x)) for x in self.scale_shapes]
        for i, (own, values) in enumerate(zip(plan.product.scales, scales, strict=True)):
            arrays[("a_scales", "b_scales")[i]] = np.asarray(own.folded(values))
            wide[i] *= np.asarray(own.repeated_to_elements(values), np.float64)
        bias = rng.integers(-9, 9, self.n).astype(np.float32)
        scale = rng.integers(1, 9, (*self.batch, groups, 1, 1)).astype(np.float32)
        for i, place in enumerate(plan.folded.operands):
            arrays[f"function operand {i}"] = (bias, scale)[place]
        found = emulator.run(plan.problem, arrays, implementation="wgmma", config=CONFIG, seed=seed)
        accs = np.zeros((2, number, m, self.n), np.float32)
        entries = (x.reshape(number, *x.shape[len(self.batch) :]) for x in wide)
        for entry, (x, matrices) in enumerate(zip(*entries, strict=True)):
            for i in range(2):
                product = reference.rows(x, matrices[:, i].swapaxes(1, 2), self.sizes)
                accs[i, entry] = product
        of_rows = np.repeat(scale.reshape(number, groups, 1), self.sizes, 1)
        of_rows = np.pad(of_rows, ((0, 0), (0, m - used), (0, 0)))
        expected = layer(*map(jnp.asarray, accs), bias, of_rows)
        is_there = np.arange(m)[:, None] < used
        for place, number in enumerate(plan.problem.function.order):
            own = np.asarray(expected[number])
            own = np.where(is_there, own, np.zeros_like(own))
            np.testing.assert_array_equal(found[place].reshape(own.shape), own)


BLOCKS = (1, 128), (128, 128)
CASES = {
    "rows by blocks": Case(BLOCKS),
    "rows by rows": Case(((1, 256), (1, 128))),
    # Of no multiple of 64 columns, of blocks of k that end short, and of all tokens.
    "one by odd blocks": Case(((1 << 20, 1 << 20), (72, 256)), n=144, k=272),
    "no scales": Case(None),
    "integers": Case(None, dtype="s8"),
    "a batch": Case(BLOCKS, n=136, k=272, sizes=(70, 9), batch=(2,)),
    "widths": Case(BLOCKS, n=72, k=144, sizes=tuple(range(1, 270, 16))),
}


@pytest.fixture(scope="session")
def kernels(run_folder, cases_of):
    """The kernels of all cases that run."""
    sources = dict.fromkeys(CASES[x["name"]].kernel for x in cases_of(test_cases))
    return Emulator(run_folder / "gated_groups", *map(carried, sources))


@pytest.mark.parametrize("name", CASES)
def test_cases(kernels, name):
    case = CASES[name]
    assert case.plan.is_fused
    assert case.plan.copies == ("rhs transposed to (groups, 2, n, k)",)
    case.check(kernels, seed=len(name))


@pytest.mark.skipif(bool(nvrtc.reason()), reason=nvrtc.reason())
@pytest.mark.parametrize("name", ["rows by blocks", "rows by rows", "no scales"])
def test_compiles_without_faults(name):
    assert nvrtc.compile_kernel(CASES[name].kernel).faults == ()


KERNEL, SCALES = (f"kernels/wgmma/{name}.cuh" for name in ("ragged_kernel", "scales"))
MISTAKES = [
    Mistake(KERNEL, "gates_weights_twice", "gated ? chunk % 2 : ", ""),
    Mistake(
        KERNEL, "weights_of_the_first_columns", " + (gated ? chunk / 2 : chunk) * kColumns", ""
    ),
    Mistake(SCALES, "gates_scales_twice", "turn % 2 == 1", "false"),
    Mistake(SCALES, "scales_as_if_gate_came_first", "kRowsInTurn", "128"),
    Mistake(KERNEL, "scales_of_the_first_group", "work.tokens.group", "0"),
    Mistake(KERNEL, "nobody_waits_for_them", "1 + kScaleThreads", "1"),
]


@pytest.fixture(scope="session")
def mistaken(kernels, run_folder):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    how = {"kernels_of": lambda case: [carried(case.kernel)], "like": kernels}
    cases, folder = [CASES["rows by blocks"]], run_folder / "gated_groups_mistaken"
    return mutants(folder, MISTAKES, cases, check=lambda made, case: case.check(made), **how)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    mistaken.mutant = MISTAKES.index(mistake) + 1
    with pytest.raises((AssertionError, RuntimeError), match=WRONG):
        CASES["rows by blocks"].check(mistaken)
