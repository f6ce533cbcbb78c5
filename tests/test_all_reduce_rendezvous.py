"""How the devices of a program meet before its first sum, in a program of its own."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"

PROGRAM = """
#include <cstdio>
#include <thread>
#include <vector>

#include "kernels/all_reduce/rendezvous.h"

using tcgemm::Status;
using Numbers = std::vector<int>;

int num_made = 0;
bool fails = false;
Status make(const Numbers& numbers, const Numbers** made) {
  ++num_made;
  if (fails) return Status::internal("nothing is made");
  *made = new Numbers(numbers);
  return Status::ok();
}

void print(const char* what, const Status& status, const Numbers* numbers) {
  std::printf("%s: %s", what, status.is_ok() ? "ok" : status.message.c_str());
  if (status.is_ok()) for (const int number : *numbers) std::printf(" %d", number);
  std::printf("\\n");
}

int main() {
  tcgemm::all_reduce::Rendezvous<Numbers> rendezvous(3, std::chrono::milliseconds(10000));
  const auto all = [&](const char* what) {
    std::vector<Status> statuses(3);
    std::vector<const Numbers*> results(3);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] { statuses[i] = rendezvous.meet(7 - i, &make, &results[i]); });
    }
    for (std::thread& thread : threads) thread.join();
    for (int i = 0; i < 3; ++i) print(what, statuses[i], results[i]);
  };
  fails = true;
  all("failed");
  fails = false;
  all("met");
  all("later");
  std::printf("made %d times\\n", num_made);

  tcgemm::all_reduce::Rendezvous<Numbers> impatient(2, std::chrono::milliseconds(20));
  const Numbers* result = nullptr;
  print("alone", impatient.meet(1, &make, &result), result);
  // The first one is forgotten: the second waits for it, in vain.
  print("late", impatient.meet(2, &make, &result), result);
  std::printf("%s\\n", impatient.result() == nullptr ? "nothing was made" : "wrong");
}
"""


def test_threads_meet_once(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    (tmp_path / "program.cc").write_text(PROGRAM)
    command = [compiler, "-std=c++17", "-pthread", f"-I{CSRC}", "program.cc", "-o", "program"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run("./program", cwd=tmp_path, capture_output=True, text=True, timeout=60)
    waited = "1 of 2 devices began the program within 20 ms"
    expected = [
        *["failed: nothing is made"] * 3,
        *["met: ok 5 6 7"] * 3,
        *["later: ok 5 6 7"] * 3,
        "made 2 times",
        f"alone: {waited}",
        f"late: {waited}",
        "nothing was made",
    ]
    assert done.stdout.splitlines() == expected, done.stderr
