"""What the wgmma family promises beyond the other families."""

import concurrent.futures
import dataclasses

import jax
import numpy as np
import pytest
from ffi_frame import Api, Buffer, DeviceMemory, call, handler_of

from jax_tcgemm.system import modules

from .gemm_call import (
    LAYOUTS,
    Case,
    Types,
    choice,
    implementations,
    make_inputs,
    mismatch,
    run_all,
    wide,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("x64")]

# A cooperative tile with multicast, ping-pong, the transposed problem, widths which store boxes
# do not divide, the last of three warpgroups, and a cluster of eight, where a block loads 18 rows.
RESIDUE_CONFIGS = (
    "128x256x64_c2x1x1_co",
    "64x64x64_c1x1x1_pp",
    "64x16x64_c1x1x1_pp_t",
    "128x160x64_c2x1x1_pp",
    "192x176x64_c1x2x1_co_t",
    "64x144x64_c8x1x1_pp_t",
)
# And those where blocks add up each other's sums.
SUMMING_CONFIGS = (
    *RESIDUE_CONFIGS,
    *("64x64x64_c1x1x4_pp", "64x64x64_c1x4x1_pp", "128x16x64_c1x1x4_co_t"),
    *("64x32x64_c1x1x4_pp_t", "64x128x64_c1x1x2_pp_t"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", RESIDUE_CONFIGS)
@pytest.mark.parametrize("least", [(120, 72, 64), (328, 360, 328)], ids=["part", "overlap"])
def test_residues_mod_8(least, config, layout):
    """Every pair of residues of M, N and K: what TMA can read and store changes with each.

    In a part of a tile, and where tiles overlap at the edges of D.
    """
    least_m, least_n, least_k = least
    cases = [
        Case(
            *(f"m{m}_n{n}", least_m + m, least_n + n, least_k + (m + n) % 8),
            batch=(1, 1 + (m + 2 * n) % 2),
        )
        for m in range(8)
        for n in range(8)
    ]
    types = [Types("bf16", "bf16", "f32"), Types("f16", "f32", "f32")]
    inputs = [make_inputs(types[i % 2], layout, case) for i, case in enumerate(cases)]
    results = run_all(inputs, implementation="wgmma", config=config)
    wrong = [m for got, each in zip(results, inputs, strict=True) if (m := mismatch(got, each))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("config", SUMMING_CONFIGS)
def test_twenty_runs_from_four_threads_agree_bit_for_bit(config):
    cases = Case("ragged", 515, 777, 2056), Case("overlap", 520, 776, 2056)
    inputs = [make_inputs(Types("bf16", "bf16", "f32"), "NN", case, real=True) for case in cases]

    def run(_):
        results = run_all(inputs, implementation="wgmma", config=config)
        return b"".join(result.tobytes() for result in results)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(run, range(20)))) == 1


@pytest.mark.parametrize("config", SUMMING_CONFIGS)
def test_an_elements_sum_does_not_depend_on_its_place(config):
    """Tiles that overlap compute an element twice, and in clusters different blocks add it up."""
    case = Case("overlap", 520, 776, 2056)
    inputs = make_inputs(Types("bf16", "f32", "f32"), "NN", case, real=True)
    a, b = inputs.a.reshape(case.m, case.k), inputs.b.reshape(case.k, case.n)
    shifts = (0, 0), (8, 40), (72, 8), (136, 264)
    moved = [
        dataclasses.replace(inputs, a=np.roll(a, down, 0).ravel(), b=np.roll(b, right, 1).ravel())
        for down, right in shifts
    ]
    d, *others = run_all(moved, implementation="wgmma", config=config)
    for other, shift in zip(others, shifts[1:], strict=True):
        np.testing.assert_array_equal(other, np.roll(d, shift, (-2, -1)))


@pytest.mark.parametrize("case", [Case("odd", 131, 77, 43), Case("aligned", 136, 80, 48)], ids=str)
@pytest.mark.parametrize("config", [*RESIDUE_CONFIGS, "64x64x64_c1x1x1_pp_split3"])
@pytest.mark.parametrize("types", ["bf16 bf16 f32", "f16 f32 f32", "f32 f32 tf32"])
def test_no_byte_beside_a_buffer_is_touched(types, config, case):
    """NaN behind each buffer stays, and does not show in D."""
    inputs = make_inputs(Types(*types.split()), "NT", case)
    problem = inputs.problem
    workspace = choice("wgmma", config, problem).workspace_bytes
    operands = [
        Buffer.of(x, operand.dtype) for operand, x in ((problem.a, inputs.a), (problem.b, inputs.b))
    ]
    d = Buffer(problem.out_dtype, inputs.expected.shape)
    run_all([inputs], implementation="wgmma", config=config)  # Programs bring what is not built.
    attributes = problem.attributes() | {
        "abi": modules.cuda.abi_version,
        "implementation": "wgmma",
        "config": config,
    }
    memory = GuardedMemory()
    outcome = call(
        handler_of(modules.cuda.registrations()["tcgemm_gemm"]),
        {"gemm": attributes},
        operands,
        [d, Buffer("u8", (workspace,))][: 1 + (workspace > 0)],
        api=Api(),
        memory=memory,
    )
    assert not outcome.code, outcome.message
    assert memory.is_untouched()
    assert not mismatch(d.array(), inputs)


class GuardedMemory(DeviceMemory):
    """The GPU's, with NaN behind each buffer."""

    GUARD = b"\xff" * 4096

    def __init__(self):
        super().__init__()
        self.at_end = False
        self._ends = []

    def put(self, index: int, data: bytes, alignment: int) -> int:
        address = super().put(index, data + self.GUARD, alignment)
        self._ends.append(address + len(data))
        return address

    def is_untouched(self) -> bool:
        return all(self.get(end, len(self.GUARD)) == self.GUARD for end in self._ends)


@pytest.mark.parametrize("config", RESIDUE_CONFIGS)
def test_two_gpus_of_one_process_at_once(config):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = [make_inputs(Types("bf16", "bf16", "f32"), "NN", Case("ragged", 515, 777, 264))]

    def run(device):
        with jax.default_device(device):
            return run_all(inputs, implementation="wgmma", config=config)[0]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, jax.devices()[:2] * 10))
    assert not any(mismatch(got, inputs[0]) for got in results)


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
