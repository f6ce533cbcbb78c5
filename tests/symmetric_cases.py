"""Symmetric products of small integers, for the tests of emulated kernels that compute half."""

import dataclasses

import numpy as np
from emulated_checks import integers

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem

TYPES = {"bf16": "f32", "f16": "f32", "f32": "tf32", "s8": "s32"}


@dataclasses.dataclass(frozen=True)
class Case:
    """D[b] = alpha X[b] X[b]^T + beta C[b], or X[b]^T X[b] of an X that lies as (k, n)."""

    n: int
    k: int = 72
    batch: int = 1
    dtype: str = "bf16"
    out: str = "bf16"
    transposed: bool = False
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def layout(self) -> str:
        """Of A and B: "0" for K-major, "1" for M- or N-major."""
        return "11" if self.transposed else "00"

    @property
    def ld(self) -> int:
        return self.n if self.transposed else self.k

    @property
    def problem(self) -> Problem:
        stride = self.n * self.k if self.batch > 1 else 0
        a, b = (
            Operand(self.dtype, transposed, self.ld, 0, stride)
            for transposed in (self.transposed, not self.transposed)
        )
        sizes = self.batch, self.batch, self.n, self.n, self.k
        scalars = {"alpha": self.alpha, "beta": self.beta}
        return Problem(*sizes, a, b, self.out, TYPES[self.dtype], **scalars, symmetric=True)

    def draw(self, seed: int) -> np.ndarray:
        shape = (self.k, self.n) if self.transposed else (self.n, self.k)
        return integers(np.random.default_rng(seed), (self.batch, *shape), self.dtype)

    def draw_c(self, seed: int) -> np.ndarray:
        shape = self.batch, self.n, self.n
        c = np.tril(integers(np.random.default_rng([seed, 1]), shape, self.out))
        return c + np.swapaxes(np.tril(c, -1), 1, 2)

    def expected(self, x: np.ndarray, c: np.ndarray | None = None) -> np.ndarray:
        x = x.astype(np.float64)
        d = np.swapaxes(x, 1, 2) @ x if self.transposed else x @ np.swapaxes(x, 1, 2)
        d = self.alpha * d + (0 if c is None else self.beta * c.astype(np.float64))
        return d.astype(DTYPES[self.out]).astype(np.float64)


def check(machine, implementation, config, case, seed=0, **how):
    """One product, of which each element must be right."""
    x = case.draw(seed)
    arrays, c = {"a": x, "b": x}, None
    if case.beta:
        c = arrays["c"] = case.draw_c(seed)
    expected = case.expected(x, c)
    how |= {"implementation": implementation, "config": config, "seed": seed}
    got = machine.run(case.problem, arrays, **how)
    np.testing.assert_array_equal(got[0].astype(np.float64), expected, "wrong")
