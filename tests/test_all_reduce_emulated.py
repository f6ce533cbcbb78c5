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
VECTORS_OF_A_LANE = 512
OTHER_CALL, TIMEOUT = 2, 1


def build(directory, devices, **how):
    source = Source("emulator/instances/all_reduce.cc", (("EMULATED_DEVICES", devices),))
    return Emulator(directory, source, families=(), **how)


@pytest.fixture(scope="module", params=[2, 5], ids=lambda n: f"{n} devices")
def machine(request, run_folder):
    machine = build(run_folder / f"all_reduce_{request.param}", request.param)
    machine.devices = request.param
    return machine


def run(machine, dtype, sizes, seed, offset=0, numbers=None, timeout_ns=2**62):
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
    addresses = [x.ctypes.data for arrays in calls for x in arrays]
    if numbers is None:
        numbers = [call for call in range(1, len(sizes) + 1) for _ in range(devices)]
    lanes = -(-max(sizes) * dtype_bytes // (16 * VECTORS_OF_A_LANE)) + 1  # The last one is idle.
    failure = ctypes.c_uint32(0)
    call = machine._library.emulate_all_reduces
    call.restype = ctypes.c_char_p
    error = call(
        dtype.encode(),
        len(sizes),
        lanes,
        (ctypes.c_int64 * len(sizes))(*sizes),
        (ctypes.c_void_p * len(addresses))(*addresses),
        (ctypes.c_uint32 * len(numbers))(*numbers),
        ctypes.c_uint64(timeout_ns),
        ctypes.byref(failure),
        ctypes.c_uint64(seed),
        machine.mutant,
    )
    if error:
        raise RuntimeError(error.decode())
    for memory, begin, size in kept:
        if not ((memory[:begin] == 0xFF).all() and (memory[begin + size :] == 0xFF).all()):
            raise RuntimeError("the kernel wrote outside an array")
    return operands, results, failure.value


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
    "two lanes": ("f32", [4 * VECTORS_OF_A_LANE + 5, 9, 4 * VECTORS_OF_A_LANE + 5]),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", CASES)
def test_sums(machine, case, seed):
    check(machine, *CASES[case], seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_that_are_not_aligned(machine, dtype):
    check(machine, dtype, [100, 17], 3, offset=1)


def test_calls_in_another_order_fail(machine):
    numbers = [1, *[2] * (machine.devices - 1)]
    _, results, failure = run(machine, "f32", [64], 0, numbers=numbers)
    assert failure == OTHER_CALL
    assert np.isnan(results[0]).all()


def test_a_device_that_does_not_come_is_a_timeout(machine):
    """The emulated clock goes on at each look, so that the first look is too late already."""
    *_, failure = run(machine, "f32", [64], 1, timeout_ns=0)
    assert failure in (0, TIMEOUT)
    found = [run(machine, "f32", [64], seed, timeout_ns=0)[1:] for seed in range(12)]
    assert any(failure == TIMEOUT for _, failure in found)
    for results, failure in found:
        assert np.isnan(results).any() == (failure == TIMEOUT)


KERNEL = "kernels/all_reduce/kernel.cuh"

MISTAKES = [
    Mistake(KERNEL, "stores_not_awaited"),
    Mistake(KERNEL, "flags_not_awaited", new="failure = Failure::kNone;"),
    Mistake(KERNEL, "turn_not_counted", finds="deadlock|wrong"),
    Mistake(KERNEL, "one_set_of_slots", "turn & 1", "0"),
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
            check(mistaken, "f32", [3001, 17, 3001, 5, 3001], seed)

    with pytest.raises((RuntimeError, AssertionError), match=mistake.finds):
        run_all()
