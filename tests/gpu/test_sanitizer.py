"""No finding of compute-sanitizer on any hand-written kernel."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .gemm_call import implementations

pytestmark = pytest.mark.sanitizer

# Only our kernels are instrumented: all of them live in the namespace tcgemm. A kernel's errors
# reach us as a status, so the tool need not report the CUDA calls that JAX expects to fail.
COMMON = ["--kernel-name", "kns=tcgemm", "--report-api-errors", "no", "--launch-timeout", "0"]
COMMON += ["--target-processes", "application-only", "--print-limit", "20"]
OPTIONS = {
    # Room after each allocation, so that running past one never lands in another.
    "memcheck": ["--padding", "512"],
    "racecheck": [],
    # It does not see what TMA stores write, and would call every result of wgmma uninitialised when
    # it is copied to the host. That results are written whole, the tests on poisoned memory show.
    "initcheck": ["--check-api-memory-access", "no"],
    "synccheck": [],
}
SUMMARIES = {
    "racecheck": r"RACECHECK SUMMARY: 0 hazards displayed",
} | dict.fromkeys(("memcheck", "initcheck", "synccheck"), r"ERROR SUMMARY: 0 errors")


@pytest.mark.parametrize("tool", OPTIONS)
def test_no_finding(tool, tmp_path, shared_kernels):
    command = ["compute-sanitizer", "--tool", tool, *COMMON, *OPTIONS[tool]]
    program = Path(__file__).with_name("sanitizer_program.py")
    environment = os.environ | {
        "TCGEMM_CACHE_DIR": str(shared_kernels),
        # One allocation for each buffer, where the default allocator would carve them from one.
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # Plain launches: the tools then name the launch at fault.
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer=",
    }
    done = subprocess.run(
        [*command, sys.executable, str(program), tool],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert re.search(SUMMARIES[tool], output), output
    # The program came to its end, and ran every kernel family.
    for name in implementations():
        if name != "cublaslt":
            assert re.search(rf"^{name}: [1-9]\d* products$", output, re.MULTILINE), output
