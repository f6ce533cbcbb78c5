"""Malformed calls of the GPU's targets, and the same under compute-sanitizer.

TCGEMM_FUZZ_CALLS says how many, TCGEMM_FUZZ_SEED which.
"""

import os
import re
import shutil

import fuzz
import pytest
from ffi_worker import Worker
from fuzz_cuda_targets import platform, targets

pytestmark = pytest.mark.usefixtures("x64")

SEED = int(os.environ.get("TCGEMM_FUZZ_SEED", "0"))
CALLS = int(os.environ.get("TCGEMM_FUZZ_CALLS", "500"))


def check(worker: Worker) -> None:
    report = fuzz.run(worker, targets(), platform(), SEED, CALLS)
    worker.close()
    assert not report.failures, "\n\n".join(report.failures[:10])
    assert report.accepted > 0
    assert report.refused > 0
    print(
        f"seed {SEED}: {report.calls} calls, {report.refused} refused, {report.accepted} accepted"
    )


@pytest.mark.gpu
def test_malformed_calls(gpu):
    with Worker("cuda") as worker:
        check(worker)


@pytest.mark.gpu
def test_every_target_is_met(gpu):
    from ffi_worker import cuda_registrations

    assert {target.target for target in targets()} == set(cuda_registrations())


@pytest.mark.sanitizer
def test_no_access_outside_a_buffer(tmp_path):
    """Every buffer is an allocation of its own, with room after it that nothing may touch."""
    log = tmp_path / "log"
    command = [shutil.which("compute-sanitizer"), "--tool", "memcheck", "--padding", "512"]
    # Our kernels alone are instrumented; what JAX and the libraries launch is theirs.
    command += ["--kernel-name", "kns=tcgemm", "--report-api-errors", "no", "--print-limit", "20"]
    command += ["--launch-timeout", "0", "--target-processes", "application-only"]
    with Worker("cuda", prefix=(*command, "--log-file", str(log))) as worker:
        check(worker)
    text = log.read_text()
    assert re.search(r"ERROR SUMMARY: 0 errors", text), text[-5000:]
