"""Kernels by name and target, as csrc/kernels/common/kernel.h finds them."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

CSRC = Path(__file__).resolve().parents[1] / "csrc"

PROGRAM = """
#include <cstdio>

#include "kernels/common/kernel.h"

using namespace tcgemm;

void print(const char* what, const KernelReference& reference, int compute_capability) {
  Device device;
  device.compute_capability = compute_capability;
  Kernel* kernel = nullptr;
  const Status status = reference.find(device, &kernel);
  const void* found = status.is_ok() ? kernel->function() : status.message.c_str();
  std::printf("%s %d: %s;", what, compute_capability, static_cast<const char*>(found));
  std::printf(" %s\\n", reference.source_for(device).target.c_str());
}

int main() {
  const KernelReference brought({"header", "brought", ""}), of_all({"header", "of_all", ""});
  const KernelReference of_one({"header", "of_one", "sm_90a"});
  print("brought", brought, 80);
  add_kernel("of_all", "for all");
  add_kernel("brought", "for 8.0", "sm_80");
  add_kernel("brought", "for 9.0", "sm_90");
  add_kernel("of_one", "for 9.0 alone", "sm_90a");
  if (add_kernel("brought", "another", "sm_80")) std::puts("added twice");
  for (int compute_capability : {80, 90, 80, 89, 90}) print("brought", brought, compute_capability);
  for (int compute_capability : {80, 90}) print("of_all", of_all, compute_capability);
  print("of_one", of_one, 90);
}
"""


def test_a_device_gets_the_kernel_of_its_own_architecture(tmp_path):
    (tmp_path / "main.cc").write_text(PROGRAM, "utf-8")
    sources = [tmp_path / "main.cc", CSRC / "kernels/common/kernel.cc"]
    flags = ["-std=c++17", "-O0", f"-I{CSRC}", "-o", tmp_path / "main"]
    subprocess.run(["g++", *flags, *sources], check=True)
    said = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout
    missing = "the program must bring the kernel brought for"
    assert said.splitlines() == [
        f"brought 80: {missing} sm_80; sm_80",
        "brought 80: for 8.0; sm_80",
        "brought 90: for 9.0; sm_90",
        "brought 80: for 8.0; sm_80",
        f"brought 89: {missing} sm_89; sm_89",
        "brought 90: for 9.0; sm_90",
        "of_all 80: for all; sm_80",
        "of_all 90: for all; sm_90",
        "of_one 90: for 9.0 alone; sm_90a",
    ]
