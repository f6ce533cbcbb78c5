"""wgmma kernels of gated products of operands with block scales, emulated."""

import dataclasses
import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import Emulator, carried
from kernel_instances import second_kernel, wgmma
from mistakes import Mistake
from mutants import mutants

from jax_tcgemm import selection
from jax_tcgemm.device.fusion import fused
from jax_tcgemm.primitives import epilogue_product
from jax_tcgemm.primitives.encodings.block_scaled import BlockScaled
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.operands.block_scales import BlockScales
from jax_tcgemm.quantization import fp8_mlp

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

E4M3, TYPES = np.dtype(jnp.float8_e4m3fn), "f8e4m3fn,f8e4m3fn"
# Halves of a tile have 128 columns, and are its parts, or 64.
WIDE, PING_PONG = "128x256x64_c2x1x1_co", "128x128x64_c2x1x1_pp"
CONFIGS = {
    WIDE: "128, 256, 2, 1, 1, false, false",
    PING_PONG: "128, 128, 2, 1, 1, true, false",
    "64x128x64_c2x1x1_pp": "64, 128, 2, 1, 1, true, false",
    "128x128x64_c2x2x1_co": "128, 128, 2, 2, 1, false, false",
}
# That leave both sums to another kernel.
SWAPPED, SPLIT = "64x96x64_c1x1x1_pp_t", f"{PING_PONG}_split2"


def layer(gate, up, bias, scale):
    """Three results, one of which is reduced; rounded once each."""
    return jnp.maximum(gate + bias, 0) * up, up.astype(jnp.bfloat16), (gate * scale).max(-1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A product: its extents, the batch (), and blocks of both operands."""

    blocks: tuple[tuple[int, int], tuple[int, int]]
    m: int = 300
    n: int = 270
    k: int = 400
    batch: tuple[int, ...] = ()

    @functools.cached_property
    def scales(self) -> list[BlockScales]:
        """Of lhs, and of one of the matrices of rhs."""
        return [
            BlockScales(
                (*self.batch, rows, self.k),
                (*self.batch, -(-rows // block[0]), -(-self.k // block[1])),
                block,
                len(self.batch),
            )
            for rows, block in zip((self.m, self.n), self.blocks, strict=True)
        ]

    @functools.cached_property
    def plan(self) -> fused.Plan:
        a, b = self.scales
        shapes = a.operand_shape, (2, *b.operand_shape), a.shape, (2, *b.shape)
        types = [
            jax.ShapeDtypeStruct(x, dtype)
            for x, dtype in zip(shapes, (E4M3, E4M3, np.float32, np.float32), strict=True)
        ]
        types += [jax.ShapeDtypeStruct(x, np.float32) for x in ((self.n,), (self.m, 1))]
        acc = jax.ShapeDtypeStruct((*self.batch, self.m, self.n), np.float32)
        params = {
            "options": CallOptions("gated_linear", "wgmma", WIDE),
            "in_place": None,
            "encoding": BlockScaled(len(self.batch), self.blocks, gated=True),
            "function": jax.make_jaxpr(layer)(acc, acc, *types[-2:]),
        }
        product = epilogue_product.product_of(*types, params)
        return fused.make_plan(product, selection.target_device("cuda"))

    def kernel(self, config):
        """Of a config that runs the function."""
        (a, _), (b, _) = self.blocks
        half = 64 if config != WIDE else 128
        rows = 64 if a % 64 == 0 else 1, half if b % half == 0 else 1
        function = self.plan.problem.epilogue.function
        struct = f"Function<tcgemm::elementwise::{function.name}>"
        own = wgmma(CONFIGS[config], struct, TYPES, layout="00", scaled_rows=rows)
        return dataclasses.replace(own, definitions=function.definitions)

    def kernels(self, config):
        """That of a config, or its bare one and the second that runs the function."""
        if config in CONFIGS:
            return [self.kernel(config)]
        (a, _), (b, _) = self.blocks
        tile, rows = CONFIGS[PING_PONG], (64 if a % 64 == 0 else 1, 128 if b % 128 == 0 else 1)
        if config == SWAPPED:
            tile, rows = "64, 96, 1, 1, 1, true, true", (64 if b % 64 == 0 else 1, 1)
        bare = wgmma(tile, "Bare", TYPES, layout="00", scaled_rows=rows)
        return [bare, second_kernel(self.plan.problem.epilogue.function)]

    def check(self, emulator, config, seed=0):
        """All results; scales are powers of two, by which sums of integers stay exact."""
        rng = np.random.default_rng(seed)
        a, b = self.scales
        values = [rng.integers(-3, 4, x) for x in (a.operand_shape, (2, *b.operand_shape))]
        scales = [2.0 ** rng.integers(-1, 2, x) for x in (a.shape, (2, *b.shape))]
        scales = [jnp.asarray(x, jnp.float32) for x in scales]
        bias, scale = (rng.integers(-9, 9, x).astype(np.float32) for x in (self.n, (self.m, 1)))
        arrays = {
            **{"a": values[0].astype(E4M3), "b": values[1].astype(E4M3)},
            **{"a_scales": a.folded(scales[0]), "b_scales": jax.vmap(b.folded)(scales[1])},
            **{"function operand 0": bias, "function operand 1": scale},
        }
        arrays = {name: np.asarray(x) for name, x in arrays.items()}
        problem = self.plan.problem
        found = emulator.run(problem, arrays, implementation="wgmma", config=config, seed=seed)
        repeated = a.repeated_to_elements, jax.vmap(b.repeated_to_elements)
        wide = [
            np.asarray(x, np.float64) * np.asarray(f(y), np.float64)
            for x, f, y in zip(values, repeated, scales, strict=True)
        ]
        accs = jnp.asarray(wide[0] @ wide[1].swapaxes(-1, -2), jnp.float32)
        expected = layer(*accs, bias, scale)
        function = problem.epilogue.function
        for place, number in enumerate(function.order):
            got, own = found[place], np.asarray(expected[number])
            if function.results[place].over:
                got = got.reshape(*own.shape, -1).max(-1)
            np.testing.assert_array_equal(got.reshape(own.shape), own)


CASES = {
    "rows by blocks": Case(((1, 128), (128, 128))),
    "rows by rows": Case(((1, 128), (1, 128))),
    "blocks by small blocks": Case(((128, 128), (64, 256))),
    "odd blocks": Case(((3, 384), (40, 128))),
    # Many tiles, and operands that are copied, the second matrix apart.
    "a batch": Case(((1, 128), (128, 128)), m=70, n=260, k=333, batch=(3,)),
}


@pytest.fixture(scope="session")
def kernels(run_folder, cases_of):
    """The kernels of all cases that run."""
    cases = [(CASES[x["name"]], x["config"]) for x in cases_of(test_configs)]
    sources = [kernel for case, config in cases for kernel in case.kernels(config)]
    return Emulator(run_folder / "gated_scales", *map(carried, dict.fromkeys(sources)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("config", [*CONFIGS, SWAPPED, SPLIT])
def test_configs(kernels, config, name):
    case = CASES[name]
    assert case.plan.is_fused
    case.check(kernels, config, seed=len(config) + len(name))


# --- its derivative -------------------------------------------------------------------------------

M, N, K = 300, 272, 400
BEHIND = {
    "128x256x64_c1x1x1_co": "128, 256, 1, 1, 1, false, false",
    PING_PONG: CONFIGS[PING_PONG],
}


@functools.cache
def pulled_back():
    """Of gate and up, which cooperative tiles read by TMA, two results beside each other."""
    acc, saved = (jax.ShapeDtypeStruct((M, N), x) for x in (np.float32, jnp.bfloat16))
    function = fp8_mlp.PulledBack("relu", np.dtype(jnp.bfloat16))
    types = [jax.ShapeDtypeStruct((M, K), jnp.float8_e5m2), jax.ShapeDtypeStruct((N, K), E4M3)]
    types += [jax.ShapeDtypeStruct(x, np.float32) for x in ((M, 4), (3, 4))]
    params = {
        "options": CallOptions("Fp8Mlp", "wgmma", PING_PONG),
        "in_place": None,
        "encoding": BlockScaled(0, ((1, 128), (128, 128))),
        "function": jax.make_jaxpr(lambda *x: [function(*x)])(acc, saved, saved),
    }
    product = epilogue_product.product_of(*types, saved, saved, params)
    return function, fused.make_plan(product, selection.target_device("cuda"))


@pytest.fixture(scope="module")
def kernels_behind(run_folder):
    own = pulled_back()[1].problem.epilogue.function
    struct = f"Function<tcgemm::elementwise::{own.name}>"
    how = {"layout": "00", "scaled_rows": (1, 128)}
    sources = [wgmma(x, struct, "f8e5m2,f8e4m3fn", **how) for x in BEHIND.values()]
    sources = [dataclasses.replace(x, definitions=own.definitions) for x in sources]
    return Emulator(run_folder / "behind_gated_scales", *map(carried, sources))


@pytest.mark.parametrize("config", BEHIND)
def test_derivative(kernels_behind, config):
    function, plan = pulled_back()
    rng = np.random.default_rng(len(config))
    a, b = (rng.integers(-3, 4, (x, K)) for x in (M, N))
    scales = [jnp.float32(2.0 ** rng.integers(-1, 2, x)) for x in ((M, 4), (3, 4))]
    gate, up = (rng.integers(-3, 4, (M, N)).astype(jnp.bfloat16) for _ in range(2))
    folded = [x.folded(own) for x, own in zip(plan.product.scales, scales, strict=True)]
    arrays = {
        **{"a": a.astype(jnp.float8_e5m2), "b": b.astype(E4M3)},
        **dict(zip(("a_scales", "b_scales"), map(np.asarray, folded), strict=True)),
        **{"function operand 0": gate, "function operand 1": up},
    }
    assert plan.folded.operands == (0, 1)
    (got,) = kernels_behind.run(plan.problem, arrays, implementation="wgmma", config=config)
    pairs = zip(plan.product.scales, scales, strict=True)
    spread = [np.asarray(x.repeated_to_elements(own), np.float64) for x, own in pairs]
    acc = jnp.asarray((a * spread[0]) @ (b * spread[1]).T, jnp.float32)
    expected = function(acc, gate, up)
    np.testing.assert_array_equal(got.reshape(expected.shape), expected)


SCALES = "kernels/wgmma/scales.cuh"
MISTAKES = [
    Mistake(SCALES, "the_first_matrixs", "is_up ? from.up_data : ", "", WIDE),
    Mistake(SCALES, "rows_of_the_tiles", "turn / 2 * rows + row % rows", "row", WIDE),
    Mistake(SCALES, "one_too_late", "row /", "(row - 1) /", PING_PONG),
    Mistake(SCALES, "not_gated", "kRowsInTurn", "1 << 20", PING_PONG),
    Mistake(SCALES, "columns_of_the_first_segment", "4 * (column / kColumnsPerScale)", "0", WIDE),
    Mistake(SCALES, "accumulators_of_the_first_half", "2 * i / kColumnsPerScale", "0", PING_PONG),
]
SHOWN = CASES["rows by blocks"]


@pytest.fixture(scope="session")
def mistaken(kernels, run_folder, cases_of):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    configs = [x["mistake"].case for x in cases_of(test_mistakes_are_found)]
    how = {"kernels_of": lambda config: [carried(SHOWN.kernel(config))], "like": kernels}
    folder = run_folder / "gated_scales_mistaken"
    return mutants(folder, MISTAKES, configs, check=SHOWN.check, **how)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    mistaken.mutant = MISTAKES.index(mistake) + 1
    with pytest.raises((AssertionError, RuntimeError), match="not equal|Mismatched"):
        any(SHOWN.check(mistaken, mistake.case, seed) for seed in range(3))
