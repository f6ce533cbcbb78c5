"""Batches of tiny matrices for tests, and the kernels that multiply them."""

import dataclasses
import functools

import numpy as np

from jax_tcgemm.kernels import Instance
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection import implementations
from jax_tcgemm.selection.devices import ASSUMED_GPU

COMPUTE = {"f64": "f64", "c128": "f64"}
# Of an accumulator and of a result: the distance between neighbors of 1.
EPSILON = {"f16": 2**-10, "bf16": 2**-7, "f32": 2**-23, "c64": 2**-23, "f64": 2**-52}
EPSILON["c128"] = EPSILON["f64"]


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


def instances(cases, target: str = "sm_90") -> list[Instance]:
    """The kernels of some cases, each once."""
    gpu = dataclasses.replace(ASSUMED_GPU, compute_capability=int(target.removeprefix("sm_")))
    candidate = implementations.Candidate("simt_batched", "default", "")
    found = (implementations.kernels(candidate, case.problem, gpu) for case in cases)
    return list(dict.fromkeys(kernel for kernels in found for kernel in kernels))
