"""The emulator of tests/emulator itself: that it finds mistakes, and says what it cannot run."""

import re

import emulated
import pytest
from emulated import Emulator, as_mutants, wgmma_table
from emulated_checks import BF16, CASE, Case, Types, check
from kernel_instances import wgmma

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())


def test_a_rejected_problem_and_a_kernel_left_out_are_errors(emulator):
    how = {"config": "64x64x64_c1x1x1_pp", "implementation": "wgmma"}
    with pytest.raises(RuntimeError, match="rejected: inputs must be .*, got f64"):
        check(emulator, Types("f64", "f64", "f64"), "NN", CASE["aligned"], **how)
    missing = wgmma("64, 64, 1, 1, 1, true, false", layout="00").kernel
    with pytest.raises(RuntimeError, match=f"must bring the kernel {re.escape(missing)}"):
        check(emulator, BF16, "NT", CASE["aligned"], **how)


KERNEL, LOADS = "kernels/wgmma/kernel.cuh", "kernels/wgmma/loads.cuh"
MULTIPLY, STORE = "kernels/wgmma/multiply.cuh", "kernels/wgmma/store.cuh"
CLUSTER_SUM = "kernels/wgmma/cluster_sum.cuh"
EMPTY_WAIT = "ptx::mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);"
FULL_WAIT = "ptx::mbarrier_wait(pipeline.full(state.stage), state.phase);"

# File, what it holds, what to put in its place, and what the emulator then finds.
MISTAKES = {
    "stages_overwritten": (KERNEL, EMPTY_WAIT, "", "more often than it expects|wrong"),
    "wrong_parity": (
        KERNEL,
        "ptx::mbarrier_wait(pipeline.order(consumer), turn);",
        "ptx::mbarrier_wait(pipeline.order(consumer), turn ^ 1);",
        "deadlock|wrong",
    ),
    "stages_not_awaited": (KERNEL, FULL_WAIT, "", "more often than it expects|wrong"),
    "stages_released_early": (
        MULTIPLY,
        "ptx::wgmma_wait_group<1>();\n  release_previous();",
        "release_previous();\n  ptx::wgmma_wait_group<1>();",
        "wrong",
    ),
    "wrong_stride": (
        MULTIPLY,
        "ptx::swizzle_128b_descriptor(b, 8192, 1024)",
        "ptx::swizzle_128b_descriptor(b, 8192, 512)",
        "wrong",
    ),
    "registers_not_handed_over": (MULTIPLY, "ptx::wgmma_fence();", "", "no wgmma.fence"),
    "sums_not_awaited": (KERNEL, "ptx::wgmma_wait_group<0>();", "", "works on its accumulators"),
    "too_many_registers": (
        KERNEL,
        "ptx::setmaxnreg_inc<T::kConsumerRegisters>();",
        "ptx::setmaxnreg_inc<T::kConsumerRegisters + 16>();",
        "deadlock",
    ),
    "block_left_early": (KERNEL, "pipeline.drain(state);", "", "block that has ended"),
    "too_few_bytes": (
        LOADS,
        "ptx::mbarrier_arrive_expect_tx(barrier, T::kLoadedBytes);",
        "ptx::mbarrier_arrive_expect_tx(barrier, T::kABytes);",
        "deadlock",
    ),
    "buffer_overwritten": (
        STORE,
        "if (thread_idx == 0) ptx::tma_store_wait_read<kTmaBuffers - kAtOnce>();",
        "if (thread_idx == 0) ptx::tma_store_wait_read<kTmaBuffers + 1 - kAtOnce>();",
        "wrong",
    ),
    "unfenced_store": (STORE, "ptx::fence_proxy_async();", "", "without fence.proxy.async"),
    "shares_overwritten": (
        CLUSTER_SUM,
        "ptx::named_barrier_sync(barrier_id, 128);",
        "",
        "wrong",
    ),
    "shares_not_awaited": (
        CLUSTER_SUM,
        "ptx::mbarrier_wait_cluster(full_, phase_);",
        "",
        "more often than it expects|deadlock|wrong",
    ),
    "shares_left_under_way": (
        KERNEL,
        "if constexpr (Config::kClusterK > 1) cluster_sum.drain();",
        "",
        "block that has ended",
    ),
}


PING_PONG, SPLIT = "128x128x64_c2x1x1_pp", "128x64x64_c1x1x2_co"


@pytest.fixture(scope="session")
def mistaken(emulator, run_folder):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    changes = as_mutants(mistake[:3] for mistake in MISTAKES.values())
    return Emulator(
        run_folder / "mistaken",
        wgmma_table("bf16", "01", PING_PONG, SPLIT),
        changes=changes,
        like=emulator,
    )


@pytest.mark.parametrize("name", [*MISTAKES, None])
def test_mistakes_are_found(mistaken, name):
    """Some show in every order of events, others take a few."""
    mistaken.mutant = list(MISTAKES).index(name) + 1 if name else 0

    config = SPLIT if name and name.startswith("shares") else PING_PONG

    def run(seed):
        how = {"implementation": "wgmma", "config": config, "seed": seed}
        check(mistaken, BF16, "NN", Case("mistaken", 392, 136, 712), num_sms=2, **how)

    if name is None:
        return run(0)
    found = ""
    for seed in range(12):
        try:
            run(seed)
        except (RuntimeError, AssertionError) as error:
            found = str(error)
            break
    assert re.search(MISTAKES[name][3], found)
