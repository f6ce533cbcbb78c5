"""Malformed calls and programs at random: some in every run, as many as one likes with -m fuzz.

TCGEMM_FUZZ_CALLS says how many, TCGEMM_FUZZ_SEED which; a failure names the seed and the number of
its call, which `python tests/fuzz.py --seed SEED --first NUMBER --count 1` repeats; of a program,
fuzz_programs.py does.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fuzz
import fuzz_cuda_targets
import fuzz_targets
import jax
import numpy as np
import pytest
from ffi_frame import Api, Buffer, HostMemory, call, poison
from ffi_worker import CrashError, Worker

from jax_tcgemm.system import modules

pytestmark = pytest.mark.usefixtures("x64")

SEED = int(os.environ.get("TCGEMM_FUZZ_SEED", "0"))
MANY = int(os.environ.get("TCGEMM_FUZZ_CALLS", "100000"))


def check(targets, count: int) -> fuzz.Report:
    with Worker(modules.cpu.__file__) as worker:
        report = fuzz.run(worker, targets, fuzz.host_platform(), SEED, count)
    assert not report.failures, "\n\n".join(report.failures[:10])
    return report


@pytest.mark.parametrize("target", fuzz_targets.HOST, ids=lambda target: target.target)
def test_malformed_calls(target):
    report = check([target], 150)
    # Both kinds were met, and what was accepted was compared with its reference.
    assert report.refused > 50
    assert report.compared == report.accepted > 5


@pytest.mark.fuzz
def test_many_malformed_calls():
    report = check(fuzz_targets.HOST, MANY)
    print(
        f"seed {SEED}: {report.calls} calls, {report.refused} refused, {report.accepted} accepted"
    )


@pytest.mark.skipif(modules.cuda is None, reason="the CUDA module is not built")
@pytest.mark.parametrize("target", fuzz_cuda_targets.targets(), ids=lambda target: target.target)
def test_calls_of_the_gpu_are_drawn(target):
    """Without a GPU, a call can be described, though not made."""
    rng, platform = np.random.default_rng(SEED), fuzz_cuda_targets.platform()
    for _ in range(20):
        assert target.draw(rng, platform).target == target.target


def test_every_target_of_the_host_is_met():
    assert {target.target for target in fuzz_targets.HOST} == set(modules.cpu.registrations())


# --- what the checks would see --------------------------------------------------------------------


def test_a_crash_is_a_failed_call():
    with Worker(modules.cpu.__file__) as worker:
        with pytest.raises(CrashError, match="the call ended the process"):
            worker.run("no such target", {}, [], [])
        assert worker.run("tcgemm_gemm", {}, [], []).code == 3  # By the process after it.


@pytest.mark.parametrize(("at_end", "offset"), [(True, 64), (False, -1)])
def test_an_access_outside_a_buffer_ends_the_process(run_python, at_end, offset):
    code = f"""
import ctypes, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from ffi_frame import HostMemory
memory = HostMemory()
memory.at_end = {at_end}
address = memory.put(0, bytes(64), 4)
memory.get(address, 64)
print("within", flush=True)
memory.get(address + {offset}, 1)
print("outside")
"""
    with pytest.raises(AssertionError, match="^within\n(?!outside)"):
        run_python(code)


def test_a_sanitizer_sees_a_read_between_a_buffer_and_the_next_page(tmp_path):
    """A planted fault that pages do not show, in a handler built as TCGEMM_SANITIZE builds ours."""
    source, library = tmp_path / "planted.cc", tmp_path / "planted.so"
    source.write_text(PLANTED)
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not on the PATH")
    find = [compiler, "-print-file-name=libasan.so"]
    runtime = subprocess.run(find, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("g++ has no AddressSanitizer")
    flags = ["-shared", "-fPIC", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    include = jax.ffi.include_dir()
    subprocess.run([compiler, *flags, "-I", include, source, "-o", library], check=True)
    code = f"""
import ctypes, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from ffi_frame import Api, Buffer, HostMemory, call
memory = HostMemory()
memory.at_end = False
handler = ctypes.cast(ctypes.CDLL({str(library)!r}).read_at, ctypes.c_void_p).value
for offset in (63, 64):
    operands = [Buffer("u8", (64,)), Buffer("u8", (offset,))]
    call(handler, {{}}, operands, [], api=Api(), memory=memory)
    print("read at", offset, flush=True)
"""
    environment = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.stdout == "read at 63\n"
    assert "AddressSanitizer: use-after-poison" in done.stderr


PLANTED = """
#include "xla/ffi/api/c_api.h"

// Reads the first operand at the number of elements of the second.
extern "C" XLA_FFI_Error* read_at(XLA_FFI_CallFrame* frame) {
  const auto* first = static_cast<const XLA_FFI_Buffer*>(frame->args.args[0]);
  const auto* second = static_cast<const XLA_FFI_Buffer*>(frame->args.args[1]);
  volatile char element = static_cast<const char*>(first->data)[second->dims[0]];
  (void)element;
  return nullptr;
}
"""


def test_wrong_results_are_seen():
    """The product of a call whose operand is changed before it is compared."""
    rng, target = fuzz.np.random.default_rng(0), fuzz_targets.Gemm
    with Worker(modules.cpu.__file__) as worker:
        seen = 0
        for _ in range(20):
            drawn = target.draw(rng, fuzz.host_platform())
            assert fuzz.execute(worker, drawn).code == 0
            assert fuzz.wrong(drawn, target) == ""
            result = drawn.results[0]
            if result.data and result.shares is None:
                result.data = poison(result.num_bytes)
                seen += "wrong" in fuzz.wrong(drawn, target)
        assert seen > 5


def test_a_handler_that_writes_to_an_operand_is_seen():
    from ffi_frame import _Buffer, _Callback, _CallFrame, ctypes

    def handler(address):
        frame = _CallFrame.from_address(address)
        operand = ctypes.c_void_p.from_address(frame.args.values).value
        ctypes.memset(_Buffer.from_address(operand).data, 1, 1)
        return None

    callback = _Callback(handler)
    with pytest.raises(AssertionError, match="operand 0 was written to"):
        call(
            ctypes.cast(callback, ctypes.c_void_p).value,
            {},
            [Buffer("u8", (4,))],
            [],
            api=Api(),
            memory=HostMemory(),
        )


# --- exported programs ----------------------------------------------------------------------------


def run_programs(tmp_path, count: int) -> dict:
    """Mutated programs in a process of their own: what became of them."""
    progress = tmp_path / "progress"
    command = [sys.executable, Path(__file__).with_name("fuzz_programs.py"), "--seed", str(SEED)]
    command += ["--count", str(count), "--progress", progress]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    reached = progress.read_text() if progress.exists() else "none"
    assert done.returncode == 0, f"seed {SEED}, program {reached}:\n{done.stderr[-5000:]}"
    figures = json.loads(done.stdout.splitlines()[-1])
    assert not figures["internal"], figures
    return figures


def test_mutated_programs(tmp_path):
    figures = run_programs(tmp_path, 40)
    assert figures["refused"] > 10
    assert figures["ran"] > 0


@pytest.mark.fuzz
def test_many_mutated_programs(tmp_path):
    print(run_programs(tmp_path, max(MANY // 10, 1)))
