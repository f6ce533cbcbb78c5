"""Workloads of products whose rows do not depend on one another.

A group has these keys::

    m, n, k      each may be a list

`for 4096` and `for 64` are our product with `batch_invariant` of so many rows, `free` the one that
is chosen for the rows that there are, and `xla` that of `jax.numpy`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

import jax_tcgemm
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload, check_keys, listed

_ROWS = (4096, 64)


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key.
    """
    check_keys(f"a group of {suite}", group, ("name", "m", "n", "k"))
    for m, n, k in itertools.product(*(listed(group[key]) for key in ("m", "n", "k"))):
        yield _workload(suite, group.get("name", ""), dtype, m, n, k)


def _workload(suite, label, dtype, m, n, k) -> Workload:
    element_type, precision, _ = DTYPES[dtype]
    ours = functools.partial(jax_tcgemm.matmul, precision=precision)
    accumulator_eps = float(jnp.finfo(jnp.float32).eps)
    return Workload(
        suite=suite,
        label=label,
        dtype=dtype,
        shape=f"{m}×{n}×{k}",
        sizes={"m": m, "n": n, "k": k},
        operands=(
            jax.ShapeDtypeStruct((m, k), element_type),
            jax.ShapeDtypeStruct((k, n), element_type),
        ),
        ours={
            "free": ours,
            **{f"for {rows}": functools.partial(ours, batch_invariant=rows) for rows in _ROWS},
        },
        peers={"xla": functools.partial(jnp.matmul, precision=precision)},
        reference=functools.partial(jnp.matmul, precision="highest"),
        tolerance=float(jnp.finfo(element_type).eps) + 8 * accumulator_eps * math.sqrt(k),
        flops=2 * m * n * k,
    )
