"""Workloads of arrays that are rounded to 8 bits, with scales by their largest magnitudes.

A group has these keys::

    m, k         extents of the array; each may be a list
    scaling      "rows", "lines" of 1 by 128 or "blocks" of 128 by 128; may be a list
    to           "f8e4m3fn", "f8e5m2" or "s8"; may be a list
    transposed   whether the transpose is quantized, too; may be a list

`quantize` is what is chosen, on a GPU the kernel; `xla` is XLA's code of the same. `copy`, XLA's
conversion to as many bytes as are written, is timed beside them: what memory allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

import jax_tcgemm
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed
from jax_tcgemm.problem.dtypes import DTYPES as ELEMENT_TYPES

_SCALINGS = {
    "rows": {"axis": -1},
    "lines": {"block": (1, 128)},
    "blocks": {"block": (128, 128)},
}
_TO = ("f8e4m3fn", "f8e5m2", "s8")


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key, scaling or dtype.
    """
    keys = ("m", "k", "scaling", "to", "transposed")
    check_keys(f"a group of {suite}", group, ("name", *keys))
    for m, k, scaling, to, transposed in itertools.product(*(listed(group[key]) for key in keys)):
        check_value("scaling", scaling, _SCALINGS)
        check_value("to", to, _TO)
        yield _workload(suite, group.get("name", ""), dtype, m, k, scaling, to, transposed)


def _workload(suite, label, dtype, m, k, scaling, to, transposed) -> Workload:
    element_type, out = DTYPES[dtype][0], ELEMENT_TYPES[to]
    how = {"dtype": out, "with_transpose": transposed} | _SCALINGS[scaling]

    def arrays(x, **more):
        made = jax_tcgemm.quantize(x, **how, **more)
        return [(q.qvalue, q.scale) for q in (made if transposed else (made,))]

    def reference(x):
        """Values before they are rounded."""
        found = []
        for i, (_, scale) in enumerate(arrays(x.astype(jnp.float32), implementation="xla")):
            own = x.T if i else x
            each = scale
            for axis, extent in enumerate(own.shape):
                if scale.shape[axis] not in (1, extent):
                    each = jnp.repeat(each, 128, axis)[: own.shape[0], : own.shape[1]]
            found.append((own / each, scale))
        return found

    def copy(x):
        return -x if transposed else x.astype(out)

    itemsize = jnp.dtype(element_type).itemsize
    return Workload(
        suite=suite,
        label=" ".join(filter(None, (label, scaling, to, "transposed" if transposed else ""))),
        dtype=dtype,
        shape=f"{m}×{k}",
        sizes={"m": m, "k": k},
        operands=(jax.ShapeDtypeStruct((m, k), element_type),),
        ours={"quantize": arrays},
        peers={"xla": lambda x: arrays(x, implementation="xla")},
        parts={"copy": copy},
        reference=reference,
        # Half a unit of the last place of the largest number, which of e5m2 has two bits.
        tolerance=1.01 * {"f8e4m3fn": 2.0**-4, "f8e5m2": 2.0**-3, "s8": 0.5 / 127}[to],
        flops=m * k * (1 + transposed),
        least_bytes=m * k * (itemsize + 1 + transposed),
    )
