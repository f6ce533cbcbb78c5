"""What the wgmma family promises beyond the other families."""

import concurrent.futures

import numpy as np
import pytest

from .gemm_call import LAYOUTS, Case, Types, implementations, make_inputs, mismatch, run_all, wide

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("x64")]

# A cooperative tile with multicast, ping-pong, and the transposed problem.
RESIDUE_CONFIGS = ("128x256x64_c2x1x1_co", "64x64x64_c1x1x1_pp", "64x16x64_c1x1x1_pp_t")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", RESIDUE_CONFIGS)
def test_residues_mod_8(config, layout):
    """Every pair of residues of M, N and K: what TMA can read and store changes with each."""
    cases = [
        Case(f"m{m}_n{n}", 120 + m, 72 + n, 64 + (m + n) % 8, batch=(1, 1 + (m + 2 * n) % 2))
        for m in range(8)
        for n in range(8)
    ]
    types = [Types("bf16", "bf16", "f32"), Types("f16", "f32", "f32")]
    inputs = [make_inputs(types[i % 2], layout, case) for i, case in enumerate(cases)]
    results = run_all(inputs, implementation="wgmma", config=config)
    wrong = [m for got, each in zip(results, inputs, strict=True) if (m := mismatch(got, each))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("config", [*RESIDUE_CONFIGS, "128x128x64_c1x1x2_co"])
def test_twenty_runs_from_four_threads_agree_bit_for_bit(config):
    types = Types("bf16", "bf16", "f32")
    inputs = [make_inputs(types, "NN", Case("ragged", 515, 777, 2056), real=True)]

    def run(_):
        return run_all(inputs, implementation="wgmma", config=config)[0].tobytes()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(run, range(20)))) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("types", ["bf16 f32 f32", "f16 f32 f32", "f32 f32 tf32"])
def test_error_is_not_above_cublaslt(types, layout):
    """||D - exact|| on the same normally distributed operands, 5 % apart at most.

    There are tiles enough that neither splits K, which shortens the sums and so the error: with
    256 x 384 x 4096, where cuBLASLt splits, it halves the error of one sum over all of K.
    """
    case = Case("many_tiles", 2048, 2048, 512)
    inputs = [make_inputs(Types(*types.split()), layout, case, real=True)]

    def error(implementation):
        config = implementations()[implementation][0]
        got = run_all(inputs, implementation=implementation, config=config)[0]
        return np.linalg.norm(wide(got) - inputs[0].expected)

    assert error("wgmma") <= 1.05 * error("cublaslt")
