"""The emulator of tests/emulator itself: that it finds mistakes, and says what it cannot run."""

import importlib
import re
from collections import Counter
from pathlib import Path

import emulated
import pytest
from emulated import Emulator, wgmma_table
from emulated_checks import BF16, CASE, Case, Types, check
from kernel_instances import wgmma
from mistakes import Mistake, as_mutants, marked_statements, plant

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

MISTAKES = [
    Mistake(KERNEL, "stages_overwritten", finds="more often than it expects|wrong"),
    Mistake(KERNEL, "wrong_parity", "turn", "turn ^ 1", finds="deadlock|wrong"),
    Mistake(KERNEL, "stages_not_awaited", finds="more often than it expects|wrong"),
    Mistake(MULTIPLY, "stages_released_early", new="ptx::wgmma_wait_group<2>();"),
    Mistake(MULTIPLY, "wrong_stride", "1024", "512"),
    Mistake(MULTIPLY, "registers_not_handed_over", finds="no wgmma.fence"),
    Mistake(KERNEL, "accumulators_not_awaited", finds="works on its accumulators"),
    Mistake(
        KERNEL,
        "too_many_registers",
        new="ptx::setmaxnreg_inc<T::kConsumerRegisters + 16>();",
        finds="deadlock",
    ),
    Mistake(KERNEL, "block_left_early", finds="block that has ended"),
    Mistake(LOADS, "too_few_bytes", "T::kLoadedBytes", "T::kABytes", finds="deadlock"),
    Mistake(
        STORE,
        "buffer_overwritten",
        new="if (thread_idx == 0) ptx::tma_store_wait_read<kTmaBuffers + 1 - kAtOnce>();",
    ),
    Mistake(STORE, "unfenced_store", finds="without fence.proxy.async"),
    Mistake(CLUSTER_SUM, "shares_overwritten"),
    Mistake(CLUSTER_SUM, "shares_not_awaited", finds="more often than it expects|deadlock|wrong"),
    Mistake(KERNEL, "shares_left_under_way", finds="block that has ended"),
]


PING_PONG, SPLIT = "128x128x64_c2x1x1_pp", "128x64x64_c1x1x2_co"


@pytest.fixture(scope="session")
def mistaken(emulator, run_folder):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    return Emulator(
        run_folder / "mistaken",
        wgmma_table("bf16", "01", PING_PONG, SPLIT),
        mistakes=as_mutants(MISTAKES),
        like=emulator,
    )


@pytest.mark.parametrize("mistake", [*MISTAKES, None], ids=str)
def test_mistakes_are_found(mistaken, mistake):
    """Some show in every order of events, others take a few."""
    mistaken.mutant = MISTAKES.index(mistake) + 1 if mistake else 0

    config = SPLIT if str(mistake).startswith("shares") else PING_PONG

    def run(seed):
        how = {"implementation": "wgmma", "config": config, "seed": seed}
        check(mistaken, BF16, "NN", Case("mistaken", 392, 136, 712), num_sms=2, **how)

    if mistake is None:
        return run(0)
    found = ""
    for seed in range(12):
        try:
            run(seed)
        except (RuntimeError, AssertionError) as error:
            found = str(error)
            break
    assert re.search(mistake.finds, found)


def planted():
    """All mistakes of the tests."""
    for path in Path(__file__).parent.glob("*emulated*.py"):
        for value in vars(importlib.import_module(path.stem)).values():
            own = value if isinstance(value, list) else [value]
            yield from (x for x in own if isinstance(x, Mistake))


def test_markers_are_those_of_mistakes():
    """Each is there once, with what the mistake replaces."""
    sources = {}
    for path in (emulated.REPOSITORY / "csrc").rglob("*"):
        if path.is_file() and "// mutant:" in (text := path.read_text()):
            sources[str(path.relative_to(emulated.REPOSITORY / "csrc"))] = text
    markers = Counter(
        (file, name)
        for file, text in sources.items()
        for name, statements in marked_statements(text).items()
        for _ in statements
    )
    mistakes = [*MISTAKES, *planted()]
    assert markers == Counter({(x.file, x.marker) for x in mistakes})
    for mistake in mistakes:
        mistake.place(sources[mistake.file])


def test_a_mistake_needs_its_marker_and_its_text_once():
    text = "  // mutant: early\n  wait(1,\n       2);\n  add(1, 1);  // mutant: twice, once\n"
    assert plant(text, [Mistake("x.cuh", "early", "2", "3")]) == text.replace("2);", "3);")
    assert plant(text, [Mistake("x.cuh", "early")]) == text.replace("wait(1,\n       2);", ";")
    made = plant(text, as_mutants([Mistake("x.cuh", "once", "1, 1", "0") for _ in range(2)]))
    assert "add((emulator::is_mutant(2) ? (0) : ((emulator::is_mutant(1) ? (0) : (1, 1)))))" in made
    sums = "  x = f(a + b * y[i], c) ? d : e::f;  // mutant: part\n"
    made = plant(sums, as_mutants([Mistake("x.cuh", "part", " + b", "")]))
    assert "f((emulator::is_mutant(1) ? (a * y[i]) : (a + b * y[i])), c)" in made
    made = "  Place(int i) : row(i), column(i) {}  // mutant: call\n"
    made = plant(made, as_mutants([Mistake("x.cuh", "call", "row(i)", "row(0)")]))
    assert ": row((emulator::is_mutant(1) ? (0) : (i))), column(i) {}" in made
    with pytest.raises(ValueError, match=r"x.cuh must have one marker late, got 0"):
        plant(text, [Mistake("x.cuh", "late")])
    with pytest.raises(ValueError, match=r"marked twice in x.cuh must have '1' once, got 2"):
        plant(text, [Mistake("x.cuh", "twice", "1", "0")])
