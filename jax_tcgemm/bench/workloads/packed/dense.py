"""Workloads of products with packed weights.

A group has these keys::

    m, n, k                  each may be a list
    format, bits, group      of the weight; see `packed_formats`
    configs                  of the kernel, to be measured by name, too; none where it is left out
    float8                   whether x is 8-bit floats with a scale for each row; no if left out

`auto` is `matmul` by a packed weight, `xla` what one writes without: numbers of the same bits,
converted, scaled and multiplied under jit, and `plain` our product of the same weight in x's dtype.
Beside x of 8-bit floats `packed` is that by the same packed weight of what they stand for in x's
dtype, as which the other peers have it, too. The least time is that of the bytes: of x, of the
packed weight, and of the result.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload, check_keys, listed
from jax_tcgemm.bench.workloads.packed.formats import WeightFormat, weight_formats


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key, format or number of bits.
    """
    optional = ("name", "configs", "float8", "format", "bits", "group")
    check_keys(f"a group of {suite}", group, (*optional, "m", "n", "k"))
    for m, n, k in itertools.product(*(listed(group[key]) for key in ("m", "n", "k"))):
        for form in weight_formats(group, k):
            label, configs = group.get("name", ""), group.get("configs", [])
            is_float8 = group.get("float8", False)
            yield _workload(suite, label, dtype, (m, n, k), form, configs, is_float8)


def _workload(suite, label, dtype, extents, form: WeightFormat, configs, is_float8) -> Workload:
    m, n, k = extents
    element_type = DTYPES[dtype][0]

    def quantized(x):
        """Quantize an 8-bit x to values and per-row scales, our operands; () for other dtypes."""
        if not is_float8:
            return ()
        q = jax_tcgemm.quantize(x, block=(1, k))
        return q.qvalue, q.scale

    def draw(key):
        of_x, of_w = jax.random.split(key)
        x = reference.random(of_x, (m, k), element_type)
        drawn = form.draw(of_w, (k, n), element_type)
        packed = jax.jit(form.pack)(drawn)
        w = jax.jit(lambda packed: packed.dequantize(element_type))(packed)
        of_x = jax.jit(quantized)(x)
        if of_x:
            x = (of_x[0].astype(jnp.float32) * of_x[1]).astype(element_type)
        return x, w, *jax.tree.leaves((packed, jax.jit(form.typed)(drawn))), *of_x

    def example(key):
        drawn = form.draw(key, (k, n), element_type)
        return form.pack(drawn), form.typed(drawn)

    key = jax.eval_shape(functools.partial(jax.random.key, impl="rbg"), 0)
    weights = jax.eval_shape(example, key)
    leaves, structure = jax.tree.flatten(weights)
    x_type = jax.ShapeDtypeStruct((m, k), element_type)
    w_type = jax.ShapeDtypeStruct((k, n), element_type)
    operands = (x_type, w_type, *leaves, *jax.eval_shape(quantized, x_type))

    def packed_and_drawn(rest):
        return jax.tree.unflatten(structure, rest[: len(leaves)])

    def packed(x, w, *rest, **how):
        return jax_tcgemm.matmul(x, packed_and_drawn(rest)[0], **how)

    def ours(x, w, *rest, **how):
        if is_float8:
            x = jax_tcgemm.QuantizedArray(*rest[len(leaves) :])
            how["preferred_element_type"] = element_type
        return packed(x, w, *rest, **how)

    def by_xla(x, w, *rest):
        return jnp.matmul(x, form.dequantize(packed_and_drawn(rest)[1], x.dtype))

    def exact(x, w, *rest):
        if is_float8:
            x = math.prod(each.astype(x.dtype) for each in rest[len(leaves) :])
        w = packed_and_drawn(rest)[0].dequantize(x.dtype)
        return jnp.matmul(x, w, precision="highest")

    def plain(x, w, *_):
        return jax_tcgemm.matmul(x, w)

    packed_bytes = sum(x.size for x in jax.tree.leaves(weights[0]))
    return Workload(
        suite=suite,
        label=label,
        dtype=dtype,
        shape=f"{m}×{n}×{k} {form.name} in groups of {form.group}" + ", x of 8 bits" * is_float8,
        sizes={"m": m, "n": n, "k": k, "bits": form.bits, "group": form.group},
        operands=operands,
        ours={"auto": ours}
        | {
            config: functools.partial(ours, implementation="packed", config=config)
            for config in configs
        },
        peers={"xla": by_xla, "plain": plain} | ({"packed": packed} if is_float8 else {}),
        reference=exact,
        # The weight is rounded, at most, and the result; for peers of x in 8 bits x, too.
        tolerance=2 * float(jnp.finfo(element_type).eps) + 1e-4,
        flops=2 * m * n * k,
        least_bytes=packed_bytes + m * ((1 if is_float8 else 2) * k + 2 * n),
        draw=draw,
        kept=tuple(range(2, 2 + len(leaves))),
    )
