"""mma_sync kernels of symmetric products, emulated: half of the tiles, each stored twice."""

import emulated
import pytest
import symmetric_cases
from emulated import Emulator, carried
from kernel_instances import mma_sync
from mistakes import Mistake
from mutants import WRONG, mutants
from symmetric_cases import Case

from jax_tcgemm.problem.dtypes import DTYPES

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

SYMMETRIC = "Symmetric<tcgemm::mma::{}>"
# Squares of one tile, of two above each other, of two side by side.
TILES = {
    "64x64": "64, 64, 128, 32, 32, 4, 3",
    "128x128": "128, 128, 64, 64, 64, 4, 2",
    "128x256": "128, 256, 128, 64, 64, 3, 1",
    "256x128": "256, 128, 128, 64, 64, 3, 1",
}
# Of two squares to thirteen; rows that no vector stores or loads; K of several stages; batches.
CASES = {
    "two": Case(264),
    "three, unaligned": Case(581, out="f32"),
    "many": Case(776, 8),
    "columns": Case(520, 40, transposed=True),
    "unaligned": Case(515, 71),
    "deep": Case(392, 392, dtype="f16", out="f16"),
    "batch": Case(272, batch=3),
    "tf32": Case(392, dtype="f32", out="f32"),
    "tf32, columns": Case(520, 36, dtype="f32", out="f32", transposed=True),
    "tf32, unaligned columns": Case(301, 37, dtype="f32", out="f32", transposed=True),
    "integers": Case(400, 144, dtype="s8", out="s32"),
    "integers, columns": Case(272, 144, 2, "s8", "s32", True, alpha=3.0, beta=-2.0),
}
SMALL, WIDE, TALL = "64x64", "128x256", "256x128"


def config_of(tile, case):
    """The config's name: its k-tile is counted in elements."""
    *_, k_bytes, warp_m, warp_n, stages, _ = TILES[tile].split(", ")
    tile_k = int(k_bytes) // DTYPES[case.dtype].itemsize
    return f"{tile}x{tile_k}_w{warp_m}x{warp_n}_s{stages}"


def kernel(tile, case):
    epilogue = "Scaled" if case.dtype == "s8" else "Bare"
    if case.n > max(map(int, tile.split("x"))):
        epilogue = SYMMETRIC.format(epilogue)
    instruction = {"f32": "tf32"}.get(case.dtype, case.dtype)
    return carried(mma_sync(TILES[tile], epilogue, instruction, case.layout))


def check(machine, tile, case, splits=1, **how):
    config = config_of(tile, case) + (f"_k{splits}" if splits > 1 else "")
    symmetric_cases.check(machine, "mma_sync", config, case, **how)


# 256x128 is a tile of 16-bit types alone.
PAIRS = [
    (tile, name)
    for tile in TILES
    for name, case in CASES.items()
    if tile != TALL or case.dtype in ("bf16", "f16")
]
ONE_SQUARE = Case(200)
SPLIT = (Case(264, 392), Case(301, 392, out="f32"))
IN_PLACE = Case(264, 144, dtype="s8", out="s32", beta=1.0)


@pytest.fixture(scope="module")
def machine(run_folder, cases_of):
    chosen = [(p["tile"], CASES[p["name"]]) for p in cases_of(test_products)]
    chosen += [(SMALL, SPLIT[0]), (WIDE, SPLIT[0]), (WIDE, ONE_SQUARE), (SMALL, IN_PLACE)]
    kernels = dict.fromkeys(kernel(*each) for each in chosen)
    return Emulator(run_folder / "symmetric_mma_sync", *kernels, families=("mma_sync",))


@pytest.mark.parametrize(("tile", "name"), PAIRS)
def test_products(machine, tile, name):
    for seed in range(2):
        check(machine, tile, CASES[name], seed=seed)


@pytest.mark.parametrize("tile", [SMALL, WIDE])
def test_splits(machine, tile):
    """Partial sums are symmetric; another kernel adds them up."""
    for case in SPLIT:
        check(machine, tile, case, splits=2)
        check(machine, tile, case, splits=8)


def test_one_square_is_computed_whole(machine):
    check(machine, WIDE, ONE_SQUARE)


@pytest.mark.parametrize("last_cluster_first", [False, True])
def test_in_place_of_c(machine, last_cluster_first):
    how = {"last_cluster_first": last_cluster_first, "in_place_of": "c"}
    check(machine, SMALL, IN_PLACE, **how)


STORE, TRIANGLE = "kernels/mma_sync/store.cuh", "tile/triangle.cuh"
COLUMNS = Case(172, 36, dtype="f32", out="f32", transposed=True)
UNALIGNED = Case(173, 37, dtype="f32", out="f32", transposed=True)
SLOT = "run_slot<kOrder>(run, in_run + i)"
FUNCTOR = "functor(values, warp_tile.batch_idx, {});"
MISTAKES = [
    Mistake(STORE, "mirrored_slot", SLOT, "run * 8 + in_run + i", COLUMNS),
    Mistake(
        STORE, "mirrored_place", "n_idx * params.n + m_idx", "m_idx * params.n + n_idx", UNALIGNED
    ),
    Mistake(
        STORE,
        "mirrored_c",
        FUNCTOR.format("n_idx, m_idx"),
        FUNCTOR.format("m_idx, n_idx"),
        IN_PLACE,
    ),
    Mistake(STORE, "not_mirrored", case=COLUMNS),
    Mistake(TRIANGLE, "rows_of_an_even_side", "side % 2", "0", COLUMNS),
    Mistake(TRIANGLE, "rows_of_the_triangle", "first - 1", "row", COLUMNS),
    Mistake(STORE, "diagonal_mirrored_alone", "!=", "==", COLUMNS),
]


def check_case(machine, case):
    check(machine, SMALL, case, **({"in_place_of": "c"} if case.beta else {}))


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    mistaken.mutant = MISTAKES.index(mistake) + 1
    with pytest.raises((AssertionError, RuntimeError), match=f"wrong|{WRONG}"):
        check_case(mistaken, mistake.case)


@pytest.fixture(scope="module")
def mistaken(machine, run_folder):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    return mutants(
        run_folder / "symmetric_mma_sync_mistaken",
        MISTAKES,
        [mistake.case for mistake in MISTAKES],
        kernels_of=lambda case: [kernel(SMALL, case)],
        check=check_case,
        families=("mma_sync",),
        like=machine,
    )
