"""The thread pool of host products, in a program of its own: what happens when a part throws."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"

PROGRAM = """
#include <cstdio>
#include <new>
#include <thread>
#include <vector>

#include "cpu/executor.h"

int main() {
  std::vector<std::thread> threads;
  const auto in_a_thread = [&](std::function<void()> task) { threads.emplace_back(task); };
  const auto nowhere = [](std::function<void()>) { throw std::bad_alloc(); };
  std::atomic<int> calls{0};
  const auto body = [&](int64_t i) {
    ++calls;
    if (i % 10 == 3) throw std::bad_alloc();
  };
  for (int i = 0; i < 100; ++i) {
    try {
      tcgemm::Executor(4, in_a_thread).parallel_for(40, body);
      std::puts("nothing was thrown");
    } catch (const std::bad_alloc&) {
    }
  }
  std::printf("%d parts were done\\n", calls.load());
  for (std::thread& thread : threads) thread.join();

  calls = 0;
  tcgemm::Executor(4, nowhere).parallel_for(40, [&](int64_t) { ++calls; });
  std::printf("%d without helpers\\n", calls.load());
}
"""


def test_what_a_part_throws_reaches_the_caller(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = tmp_path / "parts.cc", tmp_path / "parts"
    source.write_text(PROGRAM)
    command = [compiler, "-std=c++17", "-pthread", f"-I{CSRC}", source, "-o", program]
    subprocess.run(command, check=True)
    out = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout
    assert out == "4000 parts were done\n40 without helpers\n"
