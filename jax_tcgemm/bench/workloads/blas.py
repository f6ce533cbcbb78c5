"""Workloads of BLAS calls, each beside XLA's formulation of the same call.

`ours` is the call as it is and, on a GPU, by cuBLAS.

A group names a routine and `shapes`: rows and columns of A, for trsv and trsm those of B; `trans`
and, for gbmv, `band`, its diagonals on either side.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jax_tcgemm import blas
from jax_tcgemm.bench.workload import Workload
from jax_tcgemm.problem.dtypes import DTYPES


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """One workload for each shape of a group."""
    make = {"gemv": _gemv, "gbmv": _gbmv, "trsv": _solve, "trsm": _solve}[group["routine"]]
    for m, n in group["shapes"]:
        run, shapes, flops = make(group, m, n)
        ours = {"blas": run}
        if jax.default_backend() == "gpu":
            ours["cublas"] = functools.partial(run, implementation="cublas")
        yield Workload(
            suite=suite,
            label=" ".join((group["routine"], group.get("trans", "N"))),
            dtype=dtype,
            shape=f"{m}×{n}",
            sizes={"m": m, "n": n},
            operands=tuple(jax.ShapeDtypeStruct(shape, DTYPES[dtype]) for shape in shapes),
            ours=ours,
            peers={"xla": functools.partial(run, implementation="xla")},
            reference=functools.partial(run, implementation="xla"),
            tolerance=1e-4 if dtype == "f32" else 1e-12,
            flops=flops,
            draw=_well_conditioned(shapes, DTYPES[dtype]) if make is _solve else None,
        )


def _gemv(group, m, n):
    trans = group.get("trans", "N")
    run = functools.partial(blas.gemv, trans=trans)
    return run, [(m, n), (n if trans == "N" else m,)], 2 * m * n


def _gbmv(group, m, n):
    width = 2 * group["band"] + 1
    run = functools.partial(blas.gbmv, kl=group["band"], ku=group["band"], columns=n)
    return run, [(m, width), (n,)], 2 * m * width


def _solve(group, m, n):
    if group["routine"] == "trsv":
        return blas.trsv, [(m, m), (m,)], m * m
    return blas.trsm, [(m, m), (m, n)], m * m * n


def _well_conditioned(shapes, dtype):
    """Draws a triangle whose solutions neither grow nor vanish, and a right-hand side."""

    def draw(key):
        a_key, b_key = jax.random.split(key)
        a, b = (
            jax.random.normal(k, shape, dtype)
            for k, shape in zip((a_key, b_key), shapes, strict=True)
        )
        return a / shapes[0][0] + jnp.eye(shapes[0][0], dtype=dtype), b

    return draw
