"""Workloads of `jax_tcgemm.tensor`: einsum, contractions, permutations and reductions.

A group names an `operation` (einsum, contract, permute or reduce), its `subscripts`, the `extents`
of its modes, and what it is for (`name`). Ours are what `tensor` chooses ("auto") and each
implementation by name that can run all of it here; the peer is XLA's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from jax_tcgemm import tensor
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload
from jax_tcgemm.inspect.explain import explain
from jax_tcgemm.selection import IMPLEMENTATIONS_OF
from jax_tcgemm.tensor.contract import ALGORITHMS

# Bound of max |result - reference| / max |reference|: one rounding of the result, TF32 products, or
# float32 accumulation. A permutation rounds nothing.
_TOLERANCE = {"bf16": 1e-2, "f16": 2e-3, "tf32": 2e-3, "f32": 2e-5, "f64": 1e-12}


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The one workload of a group."""
    operation, subscripts = group["operation"], group["subscripts"]
    extents = group["extents"]
    inputs = subscripts.partition("->")[0].split(",")
    element, precision, _ = DTYPES[dtype]
    operands = tuple(
        jax.ShapeDtypeStruct([extents[letter] for letter in term], element) for term in inputs
    )
    functions = _functions(operation, subscripts, precision)
    yield Workload(
        suite=suite,
        label=group["name"],
        dtype=dtype,
        shape=f"{subscripts} " + " ".join(f"{k}={v}" for k, v in extents.items()),
        sizes=extents,
        operands=operands,
        ours={name: f for name, f in functions.items() if name != "xla" and _runs(f, operands)},
        peers={"xla": functions["xla"]},
        reference=_xla(operation, subscripts, "highest"),
        tolerance=0.0 if operation == "permute" else _TOLERANCE[dtype],
        flops=_flops(operation, subscripts, operands),
    )


def _functions(operation: str, subscripts: str, precision: str) -> dict[str, Callable]:
    """Ours by implementation, and XLA's own operation."""
    kind = "contract" if operation == "einsum" else operation
    names = {"auto": None} | {name: name for name in IMPLEMENTATIONS_OF[kind] if name != "xla"}

    def ours(implementation, **options):
        def run(*operands):
            with jax.default_matmul_precision(precision):
                function = getattr(tensor, operation)
                return function(subscripts, *operands, implementation=implementation, **options)

        return run

    functions = {name: ours(implementation) for name, implementation in names.items()}
    if operation == "contract":
        functions |= {
            f"cutensor_{algorithm}": ours("cutensor", algorithm=algorithm)
            for algorithm in ALGORITHMS
            if algorithm != "default"
        }
    return functions | {"xla": _xla(operation, subscripts, precision)}


def _xla(operation: str, subscripts: str, precision: str) -> Callable:
    """JAX's own: jnp.einsum says all four operations."""
    del operation
    return lambda *operands: jnp.einsum(subscripts, *operands, precision=precision)


def _runs(function: Callable, operands) -> bool:
    """Whether what was asked for by name can run here."""
    try:
        explain(function, *operands)
    except ValueError:
        return False
    return True


def _flops(operation: str, subscripts: str, operands) -> int:
    if operation in ("permute", "reduce"):
        return operands[0].size
    calls = explain(lambda *x: tensor.einsum(subscripts, *x), *operands)
    return sum(call.flops or 0 for call in calls)
