"""Malformed calls of every FFI target: valid ones changed at random, run in a process of their own.

A call may be refused, as an invalid argument and with a message; or be accepted, and then every
element of its results is what its attributes and operands say. Nothing else: no crash, no access
outside its buffers, no operand written to, no memory by the gigabyte, no waiting.

    python tests/fuzz.py --seed 0 --count 100000 [--first 0]

runs so many on the host. Call i of a seed is the same whatever is run beside it.
"""

import argparse
import collections
import dataclasses
import json
import re
import sys
import time

import fuzz_targets
import jax
import numpy as np
from ffi_frame import DTYPES, INVALID_ARGUMENT, NUMPY, Buffer, Typed, poison
from ffi_worker import CrashError, Worker
from fuzz_targets import Call, Platform, flip, one_of, wide

from jax_tcgemm.system import modules

HOST_DEVICE = {
    "compute_capability": 0,
    "num_sms": 0,
    "shared_memory_bytes": 0,
    "compiles_kernels": False,
}

_INTEGERS = [0, 1, 2, 3, 4, 7, 8, 16, 63, 64, 65, 100, 4096, -1, -2, -8, 2**16, 2**31 - 1, 2**31]
_INTEGERS += [
    2**31 + 1,
    2**32,
    2**32 - 1,
    2**40,
    2**59,
    2**61,
    2**62,
    2**63 - 1,
    -(2**31),
    -(2**63),
]
_REALS = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e300, -1e300, 1e-300, 2.0**31, 2.0**31 - 1, -(2.0**31)]
_REALS += [float("nan"), float("inf"), -float("inf")]
_WORDS = ["", "magic", "none", "n", "m", "N", "T", "C", "f16", "f32", "tf32", "f64", "s32", "bf16"]
_WORDS += ["rows", "contraction", "sums", "dots", "auto", "default", "portable", "avx2", "avx512"]
_WORDS += [
    "host",
    "relu",
    "gelu_erf",
    "silu",
    "pedantic",
    "add",
    "max",
    "min",
    "s8",
    "u8",
    "a",
    "b",
]
_WORDS += [
    *fuzz_targets.ROUTINES,
    "x" * 10000,
    "gemm\0gemm",
    "\u00e9\u4e2d",
    "m16n16k16",
    "m16n8k16",
]


# --- mutations ------------------------------------------------------------------------------------


def _change_attribute(rng, call: Call) -> None:
    name = one_of(rng, sorted(call.attributes))
    value = call.attributes[name]
    kind = rng.random()
    if kind < 0.02:
        del call.attributes[name]
    elif kind < 0.03:
        call.attributes[name + "_"] = value
    elif kind < 0.06:
        wrong = [Typed("s32", 1), Typed("f32", 1.0), "word", True, 1, 1.0, [1, 2], {"a": 1}, []]
        call.attributes[name] = wrong[rng.integers(len(wrong))]
    else:
        call.attributes[name] = _other(rng, value)


def _other(rng, value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return one_of(rng, _WORDS)
    if isinstance(value, float):
        return one_of(rng, _REALS)
    if isinstance(value, list):
        values = list(value)
        kind = int(rng.integers(4))
        if kind == 0 or not values:
            values.insert(int(rng.integers(len(values) + 1)), one_of(rng, values or _INTEGERS))
        elif kind == 1:
            values.pop(int(rng.integers(len(values))))
        else:
            i = int(rng.integers(len(values)))
            values[i] = _other(rng, values[i])
        return values
    if isinstance(value, int):
        if flip(rng):
            return int(one_of(rng, _INTEGERS))
        near = [value + 1, value - 1, 2 * value, value // 2, -value, int(rng.integers(0, 12))]
        return max(min(one_of(rng, near), 2**63 - 1), -(2**63))
    return value


def _filled(rng, dtype: str, shape) -> Buffer:
    """An operand of any dtype; of those that hold numbers, with small integers."""
    if dtype in NUMPY and flip(rng, 0.8):
        return fuzz_targets.draw(rng, dtype, shape)
    buffer = Buffer(dtype, tuple(shape))
    buffer.data = rng.bytes(buffer.num_bytes)
    return buffer


def _change_buffer(rng, call: Call) -> None:
    buffers = one_of(rng, [call.operands, call.results])
    is_operand = buffers is call.operands
    kind = int(rng.integers(8))
    if kind == 0 or not buffers:
        like = one_of(rng, call.operands) if call.operands else Buffer("f32", (4,))
        new = _filled(rng, like.dtype, like.shape) if is_operand else Buffer(like.dtype, like.shape)
        buffers.insert(int(rng.integers(len(buffers) + 1)), new)
        return
    i = int(rng.integers(len(buffers)))
    old = buffers[i]
    dtype, shape = old.dtype, list(old.shape)
    if kind == 1:
        buffers.pop(i)
        return
    if kind == 2:
        j = int(rng.integers(len(buffers)))
        buffers[i], buffers[j] = buffers[j], buffers[i]
        return
    if kind == 3:
        dtype = one_of(rng, list(DTYPES))
    elif kind == 4 and shape:
        axis = int(rng.integers(len(shape)))
        shape[axis] = max(0, one_of(rng, [0, 1, shape[axis] + 1, shape[axis] - 1, 2 * shape[axis]]))
    elif kind == 5:
        shape = [int(np.prod(shape))] if len(shape) > 1 else [*shape, 1, 1]
    elif kind == 6:
        shape = [int(one_of(rng, [0, 1, 16, 256, 4096]))]
    elif not is_operand and call.operands:
        old.shares = int(rng.integers(len(call.operands)))
    if int(np.prod(shape)) > 1 << 17:
        return
    shares = None if is_operand else old.shares
    buffers[i] = (
        _filled(rng, dtype, shape) if is_operand else Buffer(dtype, tuple(shape), None, shares)
    )


def mutate(rng, call: Call) -> None:
    """Changes a call in one to four ways."""
    for _ in range(1 + int(rng.geometric(0.6))):
        (_change_attribute if flip(rng, 0.65) else _change_buffer)(rng, call)


def _fit_shared(call: Call) -> None:
    """A result in the memory of an operand has as much of it, or has its own."""
    for result in call.results:
        if result.shares is not None and (
            result.shares >= len(call.operands)
            or call.operands[result.shares].num_bytes < result.num_bytes
        ):
            result.shares = None


_SIZE = re.compile(r"jax_tcgemm: ([\w ]+?) must hold (?:at least|exactly) (\d+) (elements|bytes)")
_COUNT = re.compile(r"operands must be .*got (\d+)")


def repair(rng, call: Call, target, message: str) -> bool:
    """Does what a refusal asks for, so that more of what follows is reached; whether it could."""
    if found := _SIZE.search(message):
        name, wanted = found[1], int(found[2])
        if name.startswith("workspace"):
            if wanted > 1 << 20 or not call.results:
                return False
            call.results[-1] = Buffer("u8", (wanted,))
            return True
        try:
            operands, results = target.names(call.attributes)
        except (KeyError, TypeError):
            return False
        for names, buffers in ((operands, call.operands), (results, call.results)):
            for i, (known, buffer) in enumerate(zip(names, buffers, strict=False)):
                if known == name and wanted <= 1 << 15:
                    is_operand = buffers is call.operands
                    new = _filled(rng, buffer.dtype, (wanted,)) if is_operand else None
                    buffers[i] = new or Buffer(buffer.dtype, (wanted,), None, buffer.shares)
            if name in names and wanted <= 1 << 15:
                return True
    if _COUNT.search(message) and call.operands:
        like = one_of(rng, call.operands)
        position = int(rng.integers(len(call.operands) + 1))
        if flip(rng):
            call.operands.insert(position, _filled(rng, like.dtype, like.shape))
        else:
            call.operands.pop(position - 1)
        return True
    return False


# --- checks ---------------------------------------------------------------------------------------


def _limits(dtype: str) -> float:
    return {"f16": 3e4, "bf16": 1e30, "f32": 1e30, "c64": 1e15, "s32": 1e18}.get(dtype, 1e100)


def _without_kernels(call: Call) -> Call:
    """Without operands that are taken for kernels which a program carries: single elements."""
    operands = list(call.operands)
    while operands and operands[-1].dtype == "pred" and np.prod(operands[-1].shape) == 1:
        operands.pop()
    return dataclasses.replace(call, operands=operands)


def wrong(call: Call, target) -> str:
    """What is wrong with the results of an accepted call; "" when nothing is."""
    with np.errstate(all="ignore"):
        try:
            expected = target.expected(_without_kernels(call))
        except (IndexError, KeyError, TypeError, ValueError, MemoryError) as error:
            return f"it was accepted, and means nothing: {error!r}"
        for result, want in zip(call.results, expected, strict=False):
            if want is None:
                continue
            if said := _difference(result, want):
                return said
    return ""


def _difference(result: Buffer, want) -> str:
    raw = np.frombuffer(result.data, np.uint8).reshape(-1, DTYPES[result.dtype][1] // 8)
    unwritten = (raw == np.frombuffer(poison(raw.size), np.uint8).reshape(raw.shape)).all(-1)
    got, values = wide(result), want.values.ravel()
    if got.size != values.size:
        return f"a result must have {values.size} elements, and has {got.size}"
    magnitude = np.broadcast_to(want.magnitude, want.values.shape).ravel()
    known = np.isfinite(values) & (magnitude < _limits(result.dtype))
    if result.shares is None and (unwritten & ~known).any():
        return f"{int((unwritten & ~known).sum())} elements of {got.size} are not written"
    if result.dtype == "s32":
        values = ((values.real + 2.0**31) % 2.0**32) - 2.0**31
    if got.dtype.kind != "c":
        values = values.real
    # The smallest numbers of float16 are not far below the second term.
    off = known & ~(np.abs(got - values) <= want.tolerance * (magnitude + 1e-3))
    if not off.any():
        return ""
    first = int(np.argmax(off))
    return (
        f"{int(off.sum())} elements of {got.size} are wrong, {int((off & unwritten).sum())} of "
        f"them not written; element {first} is {got[first]} and must be {values[first]}"
    )


# --- runs -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """What became of many calls."""

    calls: int = 0
    refused: int = 0
    accepted: int = 0
    compared: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    messages: collections.Counter = dataclasses.field(default_factory=collections.Counter)


def make(seed: int, index: int, targets, platform: Platform) -> tuple:
    """Call `index` of a seed: its numbers, its target, the call and whether it is a valid one."""
    rng = np.random.default_rng([seed, index])
    target = one_of(rng, targets)
    call = target.draw(rng, platform)
    is_valid = flip(rng, 0.08)
    if not is_valid:
        mutate(rng, call)
    return rng, target, call, is_valid


def execute(worker: Worker, call: Call):
    """What becomes of a call; raises `CrashError`."""
    _fit_shared(call)
    for result in call.results:
        result.data = None
    return worker.run(call.target, call.encoded, call.operands, call.results, at_end=call.at_end)


def run(worker: Worker, targets, platform, seed: int, count: int, first: int = 0) -> Report:
    """Executes calls and says what became of them."""
    report = Report()
    for index in range(first, first + count):
        rng, target, call, is_valid = make(seed, index, targets, platform)
        for _ in range(5):
            report.calls += 1
            try:
                outcome = execute(worker, call)
                said = _judge(report, call, target, outcome)
            except CrashError as error:
                outcome, said = None, str(error)
            if is_valid and platform.name == "host" and outcome and outcome.code:
                said = f"a valid call was refused: {outcome.message}"
            if said:
                report.failures.append(f"seed {seed}, call {index}: {said}\n{call}")
                print(report.failures[-1], file=sys.stderr, flush=True)
            if said or is_valid or outcome.code == 0:
                break
            if not flip(rng, 0.8) or not repair(rng, call, target, outcome.message):
                break
    return report


def _judge(report: Report, call: Call, target, outcome) -> str:
    """Counts an outcome; what is wrong with it, or ""."""
    if outcome.code == 0:
        report.accepted += 1
        said = wrong(call, target)
        report.compared += not said
        return said
    report.refused += 1
    report.messages[re.sub(r"-?\d+", "#", outcome.message)[:80]] += 1
    if is_library(outcome.message):
        return ""
    if outcome.code != INVALID_ARGUMENT or not outcome.message:
        return f"error {outcome.code}: {outcome.message!r}"
    untouched = (x.shares is not None or x.data == poison(x.num_bytes) for x in call.results)
    return "" if all(untouched) else f"it was refused, and wrote: {outcome.message}"


def is_library(message: str) -> bool:
    """Whether a vendor's library refused, whose own errors are passed on."""
    return bool(re.search(r"cublas|cutensor|CUBLAS|CUTENSOR", message))


def host_platform() -> Platform:
    """The host's implementations."""
    return Platform("host", modules.cpu, HOST_DEVICE)


def main() -> None:
    """Runs many calls and prints what became of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--show-messages", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    start = time.monotonic()
    with Worker(modules.cpu.__file__) as worker:
        report = run(
            worker,
            fuzz_targets.HOST,
            host_platform(),
            options.seed,
            options.count,
            options.first,
        )
    if options.show_messages:
        for message, count in report.messages.most_common():
            print(f"{count:7d}  {message}", file=sys.stderr)
    figures = {name: getattr(report, name) for name in ("calls", "refused", "accepted", "compared")}
    figures |= {"seed": options.seed, "failures": len(report.failures)}
    print(json.dumps(figures | {"seconds": round(time.monotonic() - start, 1)}))
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
