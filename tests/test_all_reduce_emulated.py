"""The all-reduce kernel run by the emulator of tests/emulator, and what it must find."""

import ctypes

import emulated
import ml_dtypes
import numpy as np
import pytest
from emulated import Emulator
from emulated_units import Source
from mistakes import Mistake, as_mutants

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
VECTORS_OF_A_CHANNEL = 512
TIMEOUT, OTHER_CALL, CONCURRENT = 1, 2, 3


class Calls(ctypes.Structure):
    """The struct of emulator/instances/all_reduce.cc."""

    _fields_ = (
        ("count", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("elements", ctypes.c_void_p),
        ("arrays", ctypes.c_void_p),
        ("call_ids", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("busy_device", ctypes.c_int),
        ("timeout_ns", ctypes.c_uint64),
        ("failure", ctypes.c_void_p),
    )


def build(directory, devices, **how):
    source = Source("emulator/instances/all_reduce.cc", (("EMULATED_DEVICES", devices),))
    return Emulator(directory, source, families=(), **how)


@pytest.fixture(scope="module", params=[2, 5], ids=lambda n: f"{n} devices")
def machine(request, run_folder):
    machine = build(run_folder / f"all_reduce_{request.param}", request.param)
    machine.devices = request.param
    return machine


def run(machine, dtype, sizes, seed, offset=0, ids=None, runs=None, busy=-1, timeout_ns=2**62):
    """Operands and results of calls of these sizes, and the failure that a kernel wrote."""
    devices, dtype_bytes = machine.devices, np.dtype(DTYPES[dtype]).itemsize
    rng = np.random.default_rng(seed)
    operands, results, kept = [], [], []
    for size in sizes:
        for arrays in (operands, results):
            for _ in range(devices):
                # NaN around what a kernel may access; aligned to 256 bytes but for `offset`.
                memory = np.full(size * dtype_bytes + 1024, 0xFF, np.uint8)
                begin = -memory.ctypes.data % 256 + 256 + offset * dtype_bytes
                held = memory[begin : begin + size * dtype_bytes].view(DTYPES[dtype])
                if arrays is operands:
                    held[:] = rng.standard_normal(size)
                arrays.append(held)
                kept.append((memory, begin, held.nbytes))
    calls = [
        arrays[call * devices : (call + 1) * devices]
        for call in range(len(sizes))
        for arrays in (operands, results)
    ]
    addresses = np.array([x.ctypes.data for arrays in calls for x in arrays], np.uint64)
    if ids is None:
        ids = np.repeat(np.arange(1, len(sizes) + 1), devices)
    elements = np.array(sizes, np.int64)
    ids, runs = (np.array(x, np.uint32) for x in (ids, [7] * devices if runs is None else runs))
    failure = np.zeros(1, np.uint32)
    described = Calls(
        count=len(sizes),
        # The last one is idle.
        num_channels=-(-max(sizes) * dtype_bytes // (16 * VECTORS_OF_A_CHANNEL)) + 1,
        elements=elements.ctypes.data,
        arrays=addresses.ctypes.data,
        call_ids=ids.ctypes.data,
        runs=runs.ctypes.data,
        busy_device=busy,
        timeout_ns=timeout_ns,
        failure=failure.ctypes.data,
    )
    call = machine._library.emulate_all_reduces
    call.restype = ctypes.c_char_p
    error = call(dtype.encode(), ctypes.byref(described), ctypes.c_uint64(seed), machine.mutant)
    if error:
        raise RuntimeError(error.decode())
    for memory, begin, size in kept:
        if not ((memory[:begin] == 0xFF).all() and (memory[begin + size :] == 0xFF).all()):
            raise RuntimeError("the kernel wrote outside an array")
    return operands, results, int(failure[0])


def check(machine, dtype, sizes, seed, **how):
    operands, results, failure = run(machine, dtype, sizes, seed, **how)
    assert failure == 0, f"wrong: failure {failure}"
    devices = machine.devices
    for call in range(len(sizes)):
        own = operands[call * devices : (call + 1) * devices]
        expected = np.zeros(sizes[call], np.float32)
        for x in own:
            expected += x.astype(np.float32)
        for got in results[call * devices : (call + 1) * devices]:
            # The order of the float32 sums is fixed, so that they are equal to the bit.
            np.testing.assert_array_equal(
                got.view(np.uint8),
                expected.astype(DTYPES[dtype]).view(np.uint8),
                err_msg="wrong",
            )


CASES = {
    "one element": ("f32", [1]),
    "whole vectors": ("bf16", [8, 4096, 64]),
    "a part of a vector": ("f16", [7, 1001, 3]),
    "two channels": ("f32", [4 * VECTORS_OF_A_CHANNEL + 5, 9, 4 * VECTORS_OF_A_CHANNEL + 5]),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", CASES)
def test_sums(machine, case, seed):
    check(machine, *CASES[case], seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_that_are_not_aligned(machine, dtype):
    check(machine, dtype, [100, 17], 3, offset=1)


def check_refused(machine, expected, seed, **how):
    """Results are NaN on the device that sees the failure, and from the next call on on all."""
    _, results, failure = run(machine, "f32", [64, 64], seed, **how)
    assert failure == expected, f"wrong: failure {failure}"
    second = results[machine.devices :]
    assert any(np.isnan(x).all() for x in results[: machine.devices]), "wrong"
    assert all(np.isnan(x).all() for x in second), "wrong"


REFUSED = {
    "another call": (OTHER_CALL, lambda n: {"ids": [1, *[2] * (n - 1), *[3] * n]}),
    "another execution": (OTHER_CALL, lambda n: {"runs": [1, *[2] * (n - 1)]}),
    "two kernels at once": (CONCURRENT, lambda n: {"busy": 0}),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls(machine, case, seed):
    expected, how = REFUSED[case]
    check_refused(machine, expected, seed, **how(machine.devices))


def test_a_device_that_does_not_come_is_a_timeout(machine):
    """Kernels that give up at the first look do not wait for others."""
    found = [run(machine, "f32", [64], seed, timeout_ns=0)[1:] for seed in range(12)]
    assert any(failure == TIMEOUT for _, failure in found)
    for results, failure in found:
        assert failure in (0, TIMEOUT)
        assert np.isnan(results).any() == (failure == TIMEOUT)


KERNEL = "kernels/all_reduce/kernel.cuh"

MISTAKES = [
    Mistake(KERNEL, "stores_not_awaited"),
    Mistake(KERNEL, "flags_not_awaited", new="failure = Failure::kNone;"),
    Mistake(KERNEL, "epoch_not_counted", finds="deadlock|wrong"),
    Mistake(KERNEL, "channel_not_released", finds="wrong|deadlock"),
    Mistake(KERNEL, "call_not_compared", "Failure::kOtherCall", "Failure::kNone", "another call"),
    Mistake(KERNEL, "call_left_out", "call_id & kCallMask", "0", "another call"),
    Mistake(KERNEL, "execution_left_out", "run & kRunMask", "0", "another execution"),
    Mistake(KERNEL, "one_set_of_slots", "epoch & 1", "0"),
    Mistake(KERNEL, "slot_of_another_device", "p.rank", "rank"),
    Mistake(KERNEL, "flag_of_another_device", "p.rank", "peer", finds="deadlock|wrong"),
    Mistake(KERNEL, "device_left_out", "convert<float>(x[rank].values[j])", "0.0f"),
    Mistake(KERNEL, "past_the_end", "i < count", "true", finds="outside|wrong"),
]


@pytest.fixture(scope="module")
def mistaken(run_folder):
    """A kernel that makes one of MISTAKES, as `mutant` says, counted from 1."""
    plain = build(run_folder / "all_reduce_2", 2)
    machine = build(
        run_folder / "all_reduce_mistaken", 2, mistakes=as_mutants(MISTAKES), like=plain
    )
    machine.devices = 2
    return machine


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    mistaken.mutant = MISTAKES.index(mistake) + 1

    def run_all():
        for seed in range(12):
            if mistake.case is not None:
                expected, how = REFUSED[mistake.case]
                check_refused(mistaken, expected, seed, **how(2))
            else:
                check(mistaken, "f32", [3001, 17, 3001, 5, 3001], seed)

    with pytest.raises((RuntimeError, AssertionError), match=mistake.finds):
        run_all()
