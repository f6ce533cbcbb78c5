"""Batches of tiny matrices for tests, and the kernels that multiply them."""

import dataclasses
import functools
import hashlib
import subprocess
from pathlib import Path

import emulated
import numpy as np

from jax_tcgemm.kernels import Instance
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem

COMPUTE = {"f64": "f64", "c128": "f64"}
# Of an accumulator and of a result: the distance between neighbours of 1.
EPSILON = {"f16": 2**-10, "bf16": 2**-7, "f32": 2**-23, "c64": 2**-23, "f64": 2**-52}
EPSILON["c128"] = EPSILON["f64"]

# Prints the expression that instantiates the kernel of each product.
_PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <string>

#include "kernels/batched/instance.h"

using namespace tcgemm;

DType dtype_of(const std::string& name) {
  for (size_t i = 0; i < kNames<DType>.size(); ++i) {
    if (name == kNames<DType>[i]) return static_cast<DType>(i);
  }
  std::abort();
}

int main(int count, char** x) {
  for (int i = 1; i + 5 < count; i += 6) {
    Problem p{};
    p.m = std::atoi(x[i]), p.n = std::atoi(x[i + 1]), p.k = std::atoi(x[i + 2]);
    p.a.transposed = x[i + 3][0] == 'T', p.b.transposed = x[i + 3][1] == 'T';
    p.a.dtype = p.b.dtype = dtype_of(x[i + 4]), p.out = dtype_of(x[i + 5]);
    std::puts(batched::kernel_source(p, batched::choose_tiling(p)).name.c_str());
  }
}
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of products; `layout` as NN, NT, TN or TT; `out`: "" for that of the operands."""

    batch: int
    m: int
    n: int
    k: int
    layout: str = "NN"
    dtype: str = "f32"
    out: str = ""

    @property
    def label(self):
        sizes = f"{self.batch}x{self.m}x{self.n}x{self.k}"
        return "_".join([sizes, self.layout, self.dtype, *[self.out] * bool(self.out)])

    @property
    def out_dtype(self):
        return self.out or self.dtype

    @property
    def problem(self):
        m, n, k = self.m, self.n, self.k
        is_at, is_bt = (x == "T" for x in self.layout)
        a = Operand(self.dtype, is_at, m if is_at else k, 0, m * k)
        b = Operand(self.dtype, is_bt, k if is_bt else n, 0, k * n)
        compute = COMPUTE.get(self.dtype, "f32")
        return Problem(self.batch, self.batch, m, n, k, a, b, self.out_dtype, compute)

    @functools.cached_property
    def arrays(self):
        """The operands of a call, by name."""
        rng = np.random.default_rng([self.batch, self.m, self.n, self.k])
        shapes = (self.batch, self.m, self.k), (self.batch, self.k, self.n)
        found = {}
        for name, shape, letter in zip("ab", shapes, self.layout, strict=True):
            x = rng.standard_normal(shape)
            if self.dtype in ("c64", "c128"):
                x = x + 1j * rng.standard_normal(shape)
            x = x.swapaxes(1, 2) if letter == "T" else x
            found[name] = np.ascontiguousarray(x).astype(DTYPES[self.dtype])
        return found

    def mismatch(self, results) -> str:
        """How D is wrong, "" where each element is as exact as its accumulator and its dtype."""
        wide = np.clongdouble if self.dtype in ("c64", "c128") else np.longdouble
        a, b = (
            (x.swapaxes(1, 2) if letter == "T" else x).astype(wide)
            for x, letter in zip(self.arrays.values(), self.layout, strict=True)
        )
        exact, size = a @ b, abs(a) @ abs(b)
        accumulator = EPSILON["f32" if self.dtype in ("f16", "bf16") else self.dtype]
        allowed = self.k * accumulator * size + EPSILON[self.out_dtype] * abs(exact)
        got = np.asarray(results[0]).astype(wide)
        wrong = ~(abs(got - exact) <= allowed)
        if not wrong.any():
            return ""
        where = tuple(map(int, np.argwhere(wrong)[0]))
        return (
            f"{self.label}: {wrong.sum()} of {wrong.size} elements are wrong, the first at "
            f"{where}: {got[where]} instead of {exact[where]}"
        )


def instances(cases, folder: Path, target: str = "sm_90") -> list[Instance]:
    """The kernels of some cases, each once."""
    command = ["g++", "-std=c++17", "-O1", "-w", f"-I{emulated.REPOSITORY / 'csrc'}"]
    command += ["-isystem", str(emulated.cuda_include())]
    program = folder / f"batched_names_{hashlib.sha256(_PROGRAM.encode()).hexdigest()[:8]}"
    program.with_suffix(".cc").write_text(_PROGRAM)
    tiling = emulated.REPOSITORY / "csrc/kernels/batched/tiling.cc"
    sources = [str(program.with_suffix(".cc")), str(tiling)]
    subprocess.run([*command, *sources, "-o", str(program)], check=True)
    asked = [str(word) for x in cases for word in (x.m, x.n, x.k, x.layout, x.dtype, x.out_dtype)]
    said = subprocess.run([str(program), *asked], capture_output=True, text=True, check=True)
    header = ("kernels/batched/kernel.cuh",)
    return [
        Instance("simt_batched", header, name, target)
        for name in dict.fromkeys(said.stdout.splitlines())
    ]
