"""What each implementation says it can do: a program has all of them, without their kernels."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import emulated
import pytest

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

CSRC = Path(__file__).resolve().parents[1] / "csrc"

# Each line is compiled as one file, which parses headers once: sources whose names do not clash.
SOURCES = (
    ("core/blas.cc", "core/problem.cc", "core/ragged_problem.cc", "core/rows_problem.cc"),
    ("cpu/host_*.cc", "cpu/blas/*.cc"),
    ("kernels/batched/*.cc",),
    ("kernels/common/*.cc", "kernels/rows/*.cc", "kernels/simt/*.cc", "kernels/wmma/*.cc"),
    ("kernels/mma_sync/mma_sync.cc", "kernels/wgmma/[!r]*.cc"),
    ("kernels/*/ragged.cc",),
    ("libraries/cublas/cublas.cc", "libraries/cublas/library.cc"),
    ("libraries/cublaslt/*.cc",),
)

PROGRAM = """
#include <cstdio>
#include <string>
#include <vector>

#include "cpu/blas/host_blas.h"
#include "cpu/host_gemm.h"
#include "cpu/host_ragged.h"
#include "cpu/host_rows.h"
#include "kernels/kernels.h"
#include "libraries/cublas/cublas.h"
#include "libraries/cublaslt/cublaslt.h"

using namespace tcgemm;

template <typename Implementation>
void print_declared(const char* kind, const Implementation* implementation) {
  std::printf("declares %s %s:", kind, implementation->name());
  const char* comma = " ";
  for (size_t i = 0; i < kNames<Feature>.size(); ++i) {
    if (!implementation->features().has(static_cast<Feature>(i))) continue;
    std::printf("%s%s", comma, kNames<Feature>[i]);
    comma = ", ";
  }
  std::puts("");
}

template <typename Problem, typename Buffers>
void print_refusal(const char* kind, const ImplementationOf<Problem, Buffers>* implementation) {
  const std::string& config = implementation->configs().front();
  const std::string reason = implementation->reject(Problem{}, Device{}, config);
  std::printf("refuses %s %s: %s\\n", kind, implementation->name(), reason.c_str());
}

template <typename Problem, typename Buffers>
void print(const char* kind, std::initializer_list<const ImplementationOf<Problem, Buffers>*> all) {
  for (const auto* implementation : all) {
    print_declared(kind, implementation);
    print_refusal(kind, implementation);
  }
}

template <typename Field>
void change(Field& field) {
  if constexpr (std::is_same_v<Field, bool>) {
    field = !field;
  } else if constexpr (std::is_same_v<Field, std::string>) {
    field += "changed";
  } else if constexpr (std::is_same_v<Field, std::vector<int64_t>>) {
    field.push_back(2);
  } else {
    field = static_cast<Field>(static_cast<int64_t>(field) + 2);
  }
}

// The fields that may have any value without a feature.
template <typename Problem>
void print_plain(const char* kind) {
  size_t count = 0;
  Problem plain{};
  visit_fields(plain, [&](std::string_view, auto&) { ++count; });
  std::printf("plain %s:", kind);
  for (size_t i = 0; i < count; ++i) {
    Problem changed{};
    std::string name;
    size_t at = 0;
    visit_fields(changed, [&](std::string_view field, auto& value) {
      if (at++ != i) return;
      change(value);
      name = field;
    });
    if (features_of(plain).lack(features_of(changed)).empty()) std::printf(" %s", name.c_str());
  }
  std::puts("");
}

int main() {
  print<Problem, Buffers>("gemm", {simt_naive(), simt_tiled(), simt_batched(), wmma_naive(),
                                   wmma_tiled(), mma_sync(), wgmma(), cublaslt(), host_gemm()});
  print<RaggedProblem, RaggedBuffers>("ragged",
                                      {mma_sync_ragged(), wgmma_ragged(), host_ragged()});
  print<RowsProblem, RowsBuffers>("rows", {simt_rows(), host_rows()});
  print<blas::Problem, blas::Buffers>("blas", {cublas_blas(), host_blas()});
  print_plain<Problem>("gemm");
  print_plain<RaggedProblem>("ragged");
  print_plain<RowsProblem>("rows");
  print_plain<blas::Problem>("blas");
}
"""

SCALARS = "alpha other than 1, beta other than 0"
FUNCTIONS = f"{SCALARS}, gated product, function"
DECLARED = {
    "gemm simt_naive": SCALARS,
    "gemm simt_tiled": SCALARS,
    "gemm simt_batched": "",
    "gemm wmma_naive": FUNCTIONS,
    "gemm wmma_tiled": FUNCTIONS,
    "gemm mma_sync": FUNCTIONS,
    "gemm wgmma": f"{FUNCTIONS}, block scales",
    "gemm cublaslt": f"{SCALARS}, function",
    "gemm host": SCALARS,
    "ragged mma_sync": "",
    "ragged wgmma": "gated product, function, block scales, gathered rows, tokens in columns",
    "ragged host": "gathered rows",
    "rows simt": "weights",
    "rows host": "weights",
    "blas cublas": f"{SCALARS}, scalars on the device, several products in a call",
    "blas host": f"{SCALARS}, scalars on the device, several products in a call",
}

# Fields that every implementation must look at, or that say more of a feature.
PLAIN = {
    "gemm": "compute batch batch_inner m n k a_transposed b_transposed a_ld a_outer_stride "
    "a_inner_stride b_ld b_outer_stride b_inner_stride up_offset symmetric function_library "
    "function_reads function_indices function_results",
    "ragged": "form compute batch m n k groups num_sizes b_transposed a_batched b_batched "
    "sizes_batched a_rows function_library function_reads function_indices function_results",
    "rows": "form a_rows b_rows targets pairs n",
    "blas": "routine batch m n k kl ku op_a op_b upper right unit a_ld a_stride b_ld b_stride "
    "c_ld c_stride has_c math atomics",
}


def _stubs(objects: list[Path]) -> str:
    """Functions that do nothing, for those that launch kernels and those of CUDA's runtime."""
    said = subprocess.run(["nm", "-P", *objects], check=True, capture_output=True, text=True)
    symbols = re.findall(r"^((?:_ZNK?6tcgemm|cuda)\S*) (\w)", said.stdout, re.MULTILINE)
    defined = {name for name, kind in symbols if kind != "U"}
    missing = sorted({name for name, kind in symbols if kind == "U"} - defined)
    return "".join(
        f'void stub{i}(void) __asm__("{name}");\nvoid stub{i}(void) {{}}\n'
        for i, name in enumerate(missing)
    )


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the program says, where every problem needs a feature that nobody has declared."""
    directory = tmp_path_factory.mktemp("features")
    (directory / "core").mkdir()
    for path in (CSRC / "core").iterdir():
        text = path.read_text("utf-8")
        if path.name == "features.h":
            text = text.replace("  kItems,\n", "  kItems,\n  kNew,\n")
            text = text.replace('a call"}', 'a call", "feature that is new"}')
        text = text.replace("  Features needed;\n", "  Features needed{Feature::kNew};\n")
        (directory / "core" / path.name).write_text(text, "utf-8")
    texts = [PROGRAM]
    for patterns in SOURCES:
        paths = [path for pattern in patterns for path in sorted(CSRC.glob(pattern))]
        texts.append("".join(f'#include "{path.relative_to(CSRC)}"\n' for path in paths))
    flags = ["-std=c++17", "-O0", "-w", f"-I{directory}", f"-I{CSRC}"]
    flags += ["-isystem", str(emulated.cuda_include())]

    def compile_one(index: int) -> Path:
        source, target = directory / f"{index}.cc", directory / f"{index}.o"
        source.write_text(texts[index], "utf-8")
        subprocess.run(["g++", *flags, "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, range(len(texts))))
    stubs = directory / "stubs.c"
    stubs.write_text(_stubs(objects), "utf-8")
    link = ["g++", *objects, "-x", "c", stubs, "-ldl", "-pthread", "-o", directory / "features"]
    subprocess.run(link, check=True)
    done = subprocess.run([directory / "features"], check=True, capture_output=True, text=True)
    return [line.split(" ", 1) for line in done.stdout.splitlines()]


def named(said, what: str) -> dict[str, str]:
    """The lines that begin with a word, by what it is of."""
    lines = [rest.split(":", 1) for word, rest in said if word == what]
    return {name: text.strip() for name, text in lines}


def test_each_implementation_declares_what_it_can_do(said):
    assert named(said, "declares") == DECLARED


def test_what_nobody_declares_is_refused_by_each_of_them(said):
    assert named(said, "refuses") == dict.fromkeys(DECLARED, "it has no feature that is new")


def test_a_field_is_a_feature_or_plain(said):
    """A new one must be either, lest an implementation that does not know it ignores it."""
    assert named(said, "plain") == PLAIN
