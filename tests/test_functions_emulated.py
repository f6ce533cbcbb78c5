"""Kernels with generated functions, emulated: where operands lie, and what is stored where."""

import dataclasses
import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import Emulator, carried
from epilogue_call import FORMS, wide
from kernel_instances import mma_sync, second_kernel, wgmma, wmma_tiled
from mistakes import Mistake, as_mutants

from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.fusion import epilogue
from jax_tcgemm.device.fusion import results as call_results
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.selection import implementations
from jax_tcgemm.selection.choice import Choice
from jax_tcgemm.selection.devices import ASSUMED_GPU

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

BF16, F16, F32 = (np.dtype(x) for x in (jnp.bfloat16, np.float16, np.float32))
K = 96

PING_PONG = {"128x128x64_c2x1x1_pp": ("128, 128, 2, 1, 1, true, false", "01")}
COOPERATIVE = "128x256x64_c2x1x1_co"
# Two blocks of 64 lines in a warpgroup, of which each may end with rows that the product has not.
TWO_BLOCKS = "256x128x64_c1x1x1_co_t"
WGMMA = PING_PONG | {
    COOPERATIVE: ("128, 256, 2, 1, 1, false, false", "01"),
    "192x176x64_c1x2x1_co_t": ("192, 176, 1, 2, 1, false, true", "10"),
    TWO_BLOCKS: ("256, 128, 1, 1, 1, false, true", "10"),
    "128x16x64_c1x1x4_co": ("128, 16, 1, 1, 4, false, false", "01"),
}
# Those that multiply by both matrices of a gated product.
GATED = PING_PONG | {
    COOPERATIVE: WGMMA[COOPERATIVE],
    "64x128x64_c2x1x1_pp": ("64, 128, 2, 1, 1, true, false", "01"),
    "128x128x64_c2x2x1_co": ("128, 128, 2, 2, 1, false, false", "01"),
}
MMA_SYNC = {"64x64x64_w32x32_s4": "64, 64, 128, 32, 32, 4, 3"}
# Of two, four and one times eight rows in a fragment.
WMMA = {
    "m16n16k16_64x64x32": ("16, 16, 16", "64, 64, 32, 32, 32, 4, 4", "OneLayout<false, false>"),
    "m32n8k16_128x128x32": ("32, 8, 16", "128, 128, 32, 64, 64, 4, 2", "AnyLayout"),
    "m8n32k16_128x128x32": ("8, 32, 16", "128, 128, 32, 64, 64, 4, 2", "AnyLayout"),
}
OTHERS = {**dict.fromkeys(MMA_SYNC, "mma_sync"), **dict.fromkeys(WMMA, "wmma_tiled")}


def everything(acc, scale, bias, residual, flag):
    """Three results, of three widths, from operands of every kind and an index."""
    z = acc * scale[..., None] + bias
    y = jnp.where(flag, z, -z) + residual
    column = jax.lax.broadcasted_iota(jnp.int32, acc.shape, acc.ndim - 1)
    kept = jnp.where(column % 3 == 0, 0, y).astype(jnp.bfloat16)
    return kept, (z * 4).astype(jnp.int8), z.astype(jnp.float16)


def gate(acc, up, slope, bias, residual):
    """Three results, of which the last is of one of the products alone."""
    kept = jnp.where(acc > 0, acc * slope, acc) * (up + bias) + residual
    return kept.astype(jnp.bfloat16), (up - acc) > 0, up.astype(jnp.float16)


def positions(acc, table, rows):
    """An operand that is repeated along one of the dimensions that rows are made of; an index."""
    step = jax.lax.broadcasted_iota(jnp.int32, acc.shape, 1)
    return acc + table + rows.T[:, :, None] * step, acc * 0 + step


def heavy(acc, bias):
    """So many steps that a tile's elements are computed in turns."""
    for step in range(40):
        acc = jnp.where(acc > step, acc - bias, acc + 2)
    return acc.astype(jnp.bfloat16), acc.sum(0)


def reductions(acc, bias):
    """Of rows, of columns and of both, in every kind, of floats and integers."""
    z = acc + bias
    steps = (z * 2).astype(jnp.int8)
    largest = (z.astype(jnp.bfloat16) - 50).max(-1)
    return z, largest, steps.min(-2), z.sum(-2), abs(z).sum()


def sums(acc, bias):
    """Nothing of the product's shape."""
    return (acc + bias).sum(-1), acc.max(-2), (acc - bias).astype(jnp.bfloat16).min(-1)


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of a product: its shape, how many batch dimensions it has, and operands.

    `weights`: "one", "pair" for those of a gated product in two arrays, "packed" for one of both
    side by side, "stacked" for one of one after the other, "alternating" for one of which every
    other column, a stretch of memory, is the second one's.
    """

    function: object
    shape: tuple[int, ...]
    num_batch: int
    operands: tuple[np.ndarray, ...]
    weights: str = "one"
    k: int = K

    @property
    def num_b(self):
        return 1 if self.weights == "one" else 2

    @functools.cached_property
    def folded(self):
        """The problem, which operands it takes, and what the dimensions are in it."""
        *outer, n = self.shape
        batch, free = outer[: self.num_batch], outer[self.num_batch :]
        own = tuple(range(len(batch)))
        pair = len(outer) if self.weights in ("packed", "stacked") else None
        columns = (n,) if pair is None else (2, n)
        weights, first, contracted = (*batch, self.k, *columns), 0, len(batch)
        if self.weights == "stacked":
            weights, first, contracted = (2, *batch, self.k, n), 1, 1 + len(batch)
        if self.weights == "alternating":
            pair, columns = len(outer) + 1, (n, 2)
            weights, contracted = (*batch, n, 2, self.k), len(batch) + 2
        accs = [jax.ShapeDtypeStruct(self.shape, F32)] * self.num_b
        jaxpr = jax.make_jaxpr(self.function)(*accs, *self.operands)
        product = dense.Product(
            options=CallOptions("matmul"),
            lhs_shape=(*batch, *free, self.k),
            lhs_dtype=BF16,
            rhs_shape=weights,
            rhs_dtype=BF16,
            result_shape=(*outer, *columns),
            result_dtype=F32,
            dimension_numbers=(
                ((len(outer),), (contracted,)),
                (own, tuple(first + axis for axis in own)),
            ),
            permutation=tuple(range(len(outer) + len(columns))),
            precision=None,
        )
        shapes = tuple(x.shape for x in self.operands)
        num_rhs = self.num_b if pair is None else 1
        whole = epilogue.Product(product, jaxpr, shapes, num_rhs, pair)
        found = whole.folded(ASSUMED_GPU)
        assert not isinstance(found, str), found
        return found

    def kernels(self):
        """By their configs those that run the function, and by "" what others leave it to."""
        function = self.folded.problem.epilogue.function
        struct = f"tcgemm::elementwise::{function.name}"
        configs = WGMMA if self.num_b == 1 else GATED
        if self.weights == "alternating":
            configs = {name: (config, "00") for name, (config, _) in PING_PONG.items()}
        found = {
            name: wgmma(config, f"Function<{struct}>", layout=layout)
            for name, (config, layout) in configs.items()
        }
        if self.num_b == 1:
            for name, tile in MMA_SYNC.items():
                found[name] = mma_sync(tile, f"Function<{struct}>", target="sm_90", layout="01")
            for name, (shape, tile, layout) in WMMA.items():
                found[name] = wmma_tiled(shape, tile, function.name, layout)
        found = {
            name: dataclasses.replace(own, definitions=function.definitions)
            for name, own in found.items()
        }
        return found | {"": second_kernel(function)}

    def bare_kernels(self, implementation, config):
        """Those of a config that run no function."""
        candidate = implementations.Candidate(implementation, config, "")
        kernels = implementations.kernels(candidate, self.folded.problem, ASSUMED_GPU)
        return [kernel for kernel in kernels if not kernel.definitions]

    def check(self, emulator, **how):
        """All results, in any order of threads."""
        folded = self.folded
        problem, used, levels = folded.problem, folded.operands, folded.levels
        function, rng = problem.epilogue.function, np.random.default_rng(0)
        a = rng.integers(-2, 3, (problem.batch, problem.m, self.k)).astype(BF16)
        shape = self.num_b, problem.batch, self.k, problem.n
        b = rng.integers(-2, 3, shape).astype(BF16)
        arrays = {"a": a, "b": b if self.weights == "stacked" else b[0]}
        if self.weights == "packed":
            arrays["b"] = np.stack(b, -2)
        if self.weights == "alternating":
            arrays["b"] = np.moveaxis(b, 0, -1).swapaxes(1, 2).swapaxes(2, 3)
        if self.weights == "pair":
            arrays["b_up"] = b[1]
        for i, number in enumerate(used):
            x = self.operands[number]
            arrays[f"function operand {i}"] = x.view(np.uint8) if x.dtype == np.bool_ else x
        got = emulator.run(problem, arrays, **how)
        sums = a.astype(np.float32) @ b.astype(np.float32)
        sums = jnp.asarray(sums.reshape(self.num_b, *self.shape))
        expected = self.function(*sums, *self.operands)
        for place, number in enumerate(function.order):
            own, result = np.asarray(expected[number]), function.results[place]
            found = got[place]
            if result.over:
                found = call_results._reduced(jnp.asarray(found), result, levels, self.shape)
                found = found.astype(own.dtype)
            assert own.dtype == found.dtype
            np.testing.assert_array_equal(found.reshape(own.shape), own)


def numbers(shape, dtype):
    """Small ones that any order of roundings keeps."""
    rng = np.random.default_rng(len(shape))
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    return rng.integers(-3, 4, shape).astype(dtype)


def of_matrix(m, n):
    operands = ((m,), F32), ((n,), BF16), ((m, n), BF16), ((m, n), np.dtype(bool))
    return Call(everything, (m, n), 0, tuple(numbers(*x) for x in operands))


def gated(m, n, weights):
    operands = ((m, 1), F32), ((n,), BF16), ((m, n), BF16)
    return Call(gate, (m, n), 0, tuple(numbers(*x) for x in operands), weights)


WHOLE, ODD = of_matrix(256, 192), of_matrix(203, 173)
STEPS = Call(positions, (3, 40, 72), 0, (numbers((40, 72), F32), numbers((40, 3), F32)))
BATCHES = Call(
    lambda acc, x, y: (acc * x[:, None, None, None] + y.astype(acc.dtype), acc > 0),
    (2, 3, 70, 72),
    2,
    (numbers((2,), F32), numbers((3, 70, 72), F16)),
)
# So many tiles that stages come around again.
WHOLE_BATCHES = Call(
    lambda acc, x, y: (acc * x + y, acc > 0),
    *((12, 256, 256), 1, (numbers((12, 256, 256), F32), numbers((256, 256), BF16))),
)
# Two steps of matrices in a stage.
RESIDUAL = Call(lambda acc, x: (acc * 2 + x,), (2, 256, 256), 1, (numbers((2, 256, 256), BF16),))
HEAVY = Call(heavy, (256, 192), 0, (numbers((192,), F32),))
# Tiles that reach past the product in both dimensions, as if they were inside it.
EDGES = Call(
    lambda acc, x, y, z, u: ((acc * x + y + z + u).astype(BF16),),
    (200, 168),
    0,
    (
        *(numbers(*x) for x in (((200, 1), F32), ((168,), BF16), ((200, 168), BF16))),
        numbers((), F32),
    ),
)
REDUCED = Call(reductions, (203, 173), 0, (numbers((173,), F32),))
REDUCED_BATCHES = Call(reductions, (3, 64, 72), 1, (numbers((72,), F32),))
SUMS = Call(sums, (2, 136, 184), 1, (numbers((2, 1, 184), F32),))
# Of so many k blocks that tiles may overlap, the last by half of what is reduced to one.
OVERLAPPING = Call(
    lambda acc: (acc.astype(jnp.bfloat16), acc.sum(-1), acc.max(-2)), (136, 392), 0, (), k=384
)
CALLS = {
    "sums": SUMS,
    "overlapping": OVERLAPPING,
    "whole": WHOLE,
    "odd": ODD,
    "steps": STEPS,
    "batches": BATCHES,
    "reduced": REDUCED,
}
CALLS |= {
    "reduced batches": REDUCED_BATCHES,
    "heavy": HEAVY,
    "edges": EDGES,
    "heavy edges": dataclasses.replace(HEAVY, shape=(200, 168), operands=(numbers((168,), F32),)),
    "whole batches": WHOLE_BATCHES,
    "residual": RESIDUAL,
}
GATED_WHOLE, GATED_ODD = gated(256, 168, "packed"), gated(203, 173, "pair")
# Not even the second matrix begins where TMA can read it.
GATED_BATCHES = Call(
    lambda acc, up, x: (acc * x[:, None, None, None] - up, acc > up, (acc + up).max(-1)),
    *((2, 3, 70, 75), 2, (numbers((2,), F32),), "packed"),
)
GATED_CALLS = {"whole": GATED_WHOLE, "odd": GATED_ODD, "batches": GATED_BATCHES}
GATED_CALLS["sums"] = dataclasses.replace(
    GATED_BATCHES,
    function=lambda acc, up, x: ((acc * up).sum(-1), up.max(-2)),
    shape=(2, 3, 70, 88),
)
GATED_CALLS["stacked"] = gated(130, 104, "stacked")
GATED_CALLS["stacked batches"] = dataclasses.replace(GATED_BATCHES, weights="stacked")
ALTERNATING = {
    "matrix": gated(130, 104, "alternating"),
    "batches": dataclasses.replace(GATED_BATCHES, weights="alternating"),
}
# Configs that leave both sums to another kernel.
NOT_GATED = "128x16x64_c1x1x4_co", "192x176x64_c1x2x1_co_t", "128x128x64_c2x1x1_pp_split2"


@pytest.fixture(scope="session")
def functions(run_folder, cases_of):
    """The kernels of all calls that run."""
    bare = [wgmma(config, layout=layout) for config, layout in WGMMA.values()]
    bare += [mma_sync(tile, target="sm_90", layout="01") for tile in MMA_SYNC.values()]
    own = [call.kernels()[""] for call in LONG.values()]
    tests = {
        test_function: CALLS,
        test_gated_function: GATED_CALLS,
        test_gates_whose_columns_alternate: ALTERNATING,
    }
    for test, calls in tests.items():
        for case in cases_of(test):
            kernels = calls[case["name"]].kernels()
            own.append(kernels.get(case["config"]) or kernels[""])
            if case["config"] in WMMA:
                own += calls[case["name"]].bare_kernels("wmma_tiled", case["config"])
    families = ("wgmma", "mma_sync", "wmma")
    sources = map(carried, dict.fromkeys([*bare, *own]))
    return Emulator(run_folder / "functions", *sources, families=families)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("config", [*WGMMA, "128x128x64_c2x1x1_pp_split2", *OTHERS])
def test_function(functions, config, name):
    implementation = OTHERS.get(config, "wgmma")
    CALLS[name].check(functions, implementation=implementation, config=config, seed=len(name))


# More parts of K than the second kernel loads before it adds them, and no whole number of times.
IN_PARTS = "128x128x64_c2x1x1_pp_split11"
LONG = {name: dataclasses.replace(CALLS[name], k=1380) for name in ("whole", "odd", "batches")}


@pytest.mark.parametrize("name", LONG)
def test_parts_of_k(functions, name):
    LONG[name].check(functions, implementation="wgmma", config=IN_PARTS, seed=len(name))


@pytest.mark.parametrize("name", GATED_CALLS)
@pytest.mark.parametrize("config", [*GATED, *NOT_GATED, *OTHERS])
def test_gated_function(functions, config, name):
    implementation = OTHERS.get(config, "wgmma")
    GATED_CALLS[name].check(functions, implementation=implementation, config=config, seed=len(name))


@pytest.mark.parametrize("name", ALTERNATING)
@pytest.mark.parametrize("config", PING_PONG)
def test_gates_whose_columns_alternate(functions, config, name):
    ALTERNATING[name].check(functions, implementation="wgmma", config=config, seed=len(name))


# Layers and their derivatives: halves of results that lie beside each other, and D in the place of
# an operand.
FORMS = {
    # Of so many k blocks that tiles may overlap.
    name: dataclasses.replace(FORMS[name], m=140, n=136, k=384)
    for name in ("gated_all", "dgated", "dgated_sums")
}
FORM_CONFIGS = {
    "gated_all": ("128x128x64_c2x1x1_pp", COOPERATIVE, "64x64x64_w32x32_s4"),
    "dgated": (COOPERATIVE, TWO_BLOCKS),
    "dgated_sums": ("128x128x64_c2x1x1_pp", "64x64x64_w32x32_s4"),
}


def kernels_of_form(name):
    function = FORMS[name].problem.epilogue.function
    text = f"Function<tcgemm::elementwise::{function.name}>"
    for config in FORM_CONFIGS[name]:
        if config in WGMMA:
            shape, layout = WGMMA[config]
            own = wgmma(shape, text, layout=layout)
        elif FORMS[name].num_b == 1:
            own = mma_sync(MMA_SYNC[config], text, target="sm_90", layout="01")
        else:
            own = second_kernel(function)
        yield dataclasses.replace(own, definitions=function.definitions)


@pytest.fixture(scope="session")
def forms(run_folder):
    """The kernels of all forms."""
    bare = mma_sync(MMA_SYNC["64x64x64_w32x32_s4"], target="sm_90", layout="01")
    own = [kernel for name in FORMS for kernel in kernels_of_form(name)]
    sources = map(carried, dict.fromkeys([bare, *own]))
    return Emulator(run_folder / "forms", *sources, families=("wgmma", "mma_sync"))


def check_form(emulator, monkeypatch, name, config, seed=0):
    """A form by the emulator in the place of the custom call."""
    case = FORMS[name]

    def call(problem, choice, operands, results, aliases):
        num_rights = len(operands) - 1 - len(case.folded.operands)
        names = ["a", "b", "b_up"][: 1 + num_rights]
        names += [f"function operand {i}" for i in range(len(case.folded.operands))]
        ((place, _),) = aliases.items() if aliases else [(None, 0)]
        found = emulator.run(
            problem,
            dict(zip(names, map(np.asarray, operands), strict=True)),
            implementation=choice.implementation,
            config=choice.config,
            seed=seed,
            in_place_of=None if place is None else names[place],
        )
        return [
            jnp.asarray(x).reshape(result.shape) for x, result in zip(found, results, strict=True)
        ]

    monkeypatch.setattr(epilogue, "call", call)
    arrays = case.draw(np.random.default_rng(seed))
    choice = Choice("mma_sync" if config in MMA_SYNC else "wgmma", config, "")
    case.compare([wide(x) for x in case.call(arrays, choice)], arrays)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "config"), [(name, x) for name, configs in FORM_CONFIGS.items() for x in configs]
)
def test_form(forms, monkeypatch, name, config):
    for seed in range(2):
        check_form(forms, monkeypatch, name, config, seed)


STORE, TILE = "kernels/wgmma/function_store.cuh", "epilogue/function.cuh"
READS, REDUCTIONS = "epilogue/function_reads.cuh", "epilogue/reductions.cuh"
BOXES = "kernels/wgmma/function_boxes.cuh"
WMMA_KERNEL, WMMA_STORE = "kernels/wmma/tiled_kernel.cuh", "kernels/wmma/store.cuh"
WMMA_SQUARE, WMMA_TALL, WMMA_WIDE = WMMA
MISTAKES = [
    Mistake(TILE, "not_exchanged", case=WHOLE),
    Mistake(TILE, "wrong_half", "8", "4", WHOLE),
    Mistake(TILE, "not_bounded", "< batch_", "<= batch_", ODD),
    Mistake(TILE, "wrong_column", " + e", "", ODD),
    Mistake(TILE, "wrong_pair", "8", "4", HEAVY),
    Mistake(READS, "another_threads_vector", " + lane % 4", "", WHOLE),
    Mistake(TILE, "one_line_for_all", "kVariesAlong<along, kSwapped> ? half : ", "", WHOLE),
    Mistake(READS, "no_period", "period_idx * read.m_outer", "0 * read.m_outer", STEPS),
    Mistake(TILE, "wrong_extent", "index.extent", "1", STEPS),
    Mistake(TILE, "one_of_two_neighbors", "1", "0", REDUCED),
    Mistake(TILE, "the_second_eight_alone", "combine<kind>(all, two)", "two", SUMS),
    Mistake(TILE, "the_first_eight_lines_alone", " + 1", "", (SUMS, TWO_BLOCKS)),
    Mistake(TILE, "eights_beside_each_other", " * kEights", "", SUMS),
    Mistake(
        REDUCTIONS,
        "half_of_eight_rows",
        "is_second ? values[i] : values[i + step]",
        "Value(0)",
        REDUCED,
    ),
    Mistake(TILE, "outside_is_reduced", "group < groups_ &&", "true ||", REDUCED),
    Mistake(TILE, "wrong_eight", "kAlongM", "(2 * kAlongM)", REDUCED),
    Mistake(TILE, "wrong_place", "place % 2", "0", REDUCED),
    Mistake(REDUCTIONS, "maxima_from_0", "-elementwise::infinity<Value>()", "Value(0)", REDUCED),
    Mistake(READS, "batches_exchanged", "batch_idx - ", "", BATCHES),
    Mistake(TILE, "gate_for_up", "up", "acc", GATED_ODD),
    Mistake(STORE, "no_second_sum", "acc[block][kAccs + place]", "0", GATED_ODD),
    Mistake(STORE, "a_part_twice", "kPartIdx % kBlockParts * kPart * 4", "0", WHOLE),
    Mistake(STORE, "another_parts_reads", "reads_[kPartIdx]", "reads_[0]", WHOLE_BATCHES),
    Mistake(STORE, "the_next_turns_reads", "own", "reads", HEAVY),
    Mistake(
        STORE,
        "the_next_blocks_reads",
        "is_used(part + 1)",
        "is_used(part + 1) && is_used(part)",
        (ODD, TWO_BLOCKS),
    ),
    Mistake(STORE, "a_turns_line", "64", "32", HEAVY),
    Mistake(
        STORE,
        "a_turns_accumulators",
        "copy(i.value / kBlockParts, kFirst + v, v);",
        "copy(0, v, v);",
        HEAVY,
    ),
    Mistake(BOXES, "another_warpgroups_box", "consumer", "0", WHOLE_BATCHES),
    Mistake(BOXES, "another_columns_box", "step % Plan::kStepsOfBlock * 64", "0", WHOLE_BATCHES),
    Mistake(BOXES, "another_halfs_matrix", "(row + 8 * half)", "row", WHOLE_BATCHES),
    Mistake(BOXES, "a_step_too_late", "Plan::kStepsOfStage", "1", RESIDUAL),
    Mistake(BOXES, "a_stage_not_given_back", case=WHOLE_BATCHES),
    Mistake(BOXES, "the_next_stage_not_taken", case=WHOLE_BATCHES),
    Mistake(STORE, "wrong_end", "2 * ", "", GATED_WHOLE),
    Mistake(
        STORE,
        "halves_exchanged",
        "acc[i / kHalf][i % kHalf]",
        "acc[i / kHalf][kHalf + i % kHalf]",
        GATED_WHOLE,
    ),
    Mistake("kernels/wgmma/scheduler.cuh", "tiles_too_far_apart", " / 2", "", GATED_WHOLE),
    Mistake(TILE, "a_runs_rows", "4", "8", (WHOLE, *MMA_SYNC)),
    Mistake("tile/fragment.cuh", "another_runs", " + run * 8", "", (WHOLE, *MMA_SYNC)),
    Mistake("tile/fragment.cuh", "a_runs_place", "run * 8 + ", "", (WHOLE, *MMA_SYNC)),
    Mistake(
        TILE, "gate_for_up_in_the_second_kernel", "kNumProducts - 1", "0", (GATED_ODD, *MMA_SYNC)
    ),
    Mistake(TILE, "outside_is_whole", "m_idx + 8 <= batch.m_end &&", "", (BATCHES, *MMA_SYNC)),
    Mistake(WMMA_KERNEL, "the_last_fragments", case=(WHOLE, WMMA_SQUARE)),
    Mistake(WMMA_KERNEL, "another_fragments_rows", "kMmaM", "8", (WHOLE, WMMA_SQUARE)),
    Mistake(WMMA_KERNEL, "another_warps_columns", " + warp_n", "", (WHOLE, WMMA_SQUARE)),
    Mistake(WMMA_STORE, "the_first_eight_rows", "row + ", "", (WHOLE, WMMA_TALL)),
    Mistake(
        WMMA_STORE, "the_first_columns", "column + lane % 4 * 2", "lane % 4 * 2", (WHOLE, WMMA_TALL)
    ),
    Mistake(WMMA_STORE, "the_first_group", " + 8 * group", "", (WHOLE, WMMA_WIDE)),
]


PARTS = "epilogue/function_kernel.cuh"
MISTAKES_OF_PARTS = [
    Mistake(PARTS, "split_not_bounded", case=(LONG["odd"], IN_PARTS)),
    Mistake(
        PARTS,
        "a_split_is_left_out",
        "+= kSplitsAtOnce",
        "+= kSplitsAtOnce + 1",
        (LONG["odd"], IN_PARTS),
    ),
]
FORM_MISTAKES = [
    Mistake(TILE, "rows_too_short", "params_.row_lengths[i]", "params_.n", "gated_all"),
    Mistake(
        TILE, "no_second_half", "params_.results[i]", "params_.results[i < 2 ? i : 1]", "gated_all"
    ),
    Mistake(TILE, "halves_exchanged", "0", "1", "dgated"),
]
# Those that no program can choose from: constants depend on what they change.
OF_CONSTANTS = ("kernels/wgmma/scheduler.cuh", "tiles_too_far_apart"), (TILE, "halves_exchanged")
MUTANTS = [
    mistake
    for mistake in (*MISTAKES, *MISTAKES_OF_PARTS, *FORM_MISTAKES)
    if (mistake.file, mistake.marker) not in OF_CONSTANTS
]


def call_of(mistake):
    """The call that shows a mistake, and its config."""
    default = COOPERATIVE if mistake.file == BOXES else next(iter(PING_PONG))
    return mistake.case if isinstance(mistake.case, tuple) else (mistake.case, default)


def kernels_of_mistake(mistake):
    if isinstance(mistake.case, str):
        return [next(kernels_of_form(mistake.case))]
    call, config = call_of(mistake)
    kernels = call.kernels()
    # What leaves it to another kernel is bare.
    chosen = [kernels.get(config) or kernels[""]]
    if config in WMMA:
        chosen += call.bare_kernels("wmma_tiled", config)
    elif config in MMA_SYNC and config not in kernels:
        chosen.append(mma_sync(MMA_SYNC[config], target="sm_90", layout="01"))
    elif config == IN_PARTS:
        tile, layout = WGMMA[IN_PARTS.removesuffix("_split11")]
        chosen.append(wgmma(tile, layout=layout))
    return chosen


def check_call(emulator, mistake):
    call, config = call_of(mistake)
    call.check(emulator, implementation=OTHERS.get(config, "wgmma"), config=config)


@pytest.fixture(scope="session")
def mistaken(functions, run_folder, cases_of):
    """Kernels that make one of MUTANTS, as `mutant` says, counted from 1."""
    tests = test_mistakes_are_found, test_mistakes_of_parts_are_found
    tests += (test_mistakes_in_forms_are_found,)
    mistakes = [params["mistake"] for test in tests for params in cases_of(test)]
    kernels = dict.fromkeys(x for mistake in mistakes for x in kernels_of_mistake(mistake))
    how = {"mistakes": as_mutants(MUTANTS), "like": functions}
    return Emulator(run_folder / "functions_mistaken", *map(carried, kernels), **how)


@pytest.fixture
def mutant(request, mistake, tmp_path):
    """Kernels that make the mistake."""
    if mistake in MUTANTS:
        made = request.getfixturevalue("mistaken")
        made.mutant = 1 + MUTANTS.index(mistake)
        return made
    functions = request.getfixturevalue("functions")
    own = map(carried, kernels_of_mistake(mistake))
    return Emulator(tmp_path, *own, mistakes=[mistake], like=functions)


WRONG = "not equal|wrote outside|Mismatched|deadlock"


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mutant, mistake):
    with pytest.raises((AssertionError, RuntimeError), match=WRONG):
        check_call(mutant, mistake)


@pytest.mark.parametrize("mistake", MISTAKES_OF_PARTS, ids=str)
def test_mistakes_of_parts_are_found(mutant, mistake):
    with pytest.raises((AssertionError, RuntimeError), match="not equal|Mismatched"):
        check_call(mutant, mistake)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mistake", FORM_MISTAKES, ids=str)
def test_mistakes_in_forms_are_found(mutant, monkeypatch, mistake):
    with pytest.raises((AssertionError, RuntimeError), match="wrong of|wrote outside"):
        check_form(mutant, monkeypatch, mistake.case, FORM_CONFIGS[mistake.case][0])


def test_kernels_are_right_without_mistakes(mistaken, monkeypatch, cases_of):
    """Those that make mistakes where they are told to."""
    mistaken.mutant = 0
    tests = test_mistakes_are_found, test_mistakes_of_parts_are_found
    for mistake in (params["mistake"] for test in tests for params in cases_of(test)):
        if mistake in MUTANTS:
            check_call(mistaken, mistake)
    for params in cases_of(test_mistakes_in_forms_are_found):
        name = params["mistake"].case
        with jax.enable_x64(True):
            check_form(mistaken, monkeypatch, name, FORM_CONFIGS[name][0])
