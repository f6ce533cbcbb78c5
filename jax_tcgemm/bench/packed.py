"""Workloads of products with packed weights.

A group has these keys::

    m, n, k, bits, group      0: scales of whole columns; each may be a list
    configs                   of the kernel, to be measured by name, too; none where it is left out
    float8                    whether x is 8-bit floats with a scale for each row; no if left out

`auto` is `matmul` by a packed weight, `xla` what one writes without: integers of the same bits,
converted, scaled and multiplied under jit, and `plain` our product of the same weight in x's dtype.
Beside x of 8-bit floats `packed` is that by the same packed weight of what they stand for in x's
dtype, as which the other peers have it, too. The least time is that of the bytes: of x, of the
packed weight, and of the result.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key or number of bits.
    """
    keys = ("m", "n", "k", "bits", "group")
    check_keys(f"a group of {suite}", group, ("name", "configs", "float8", *keys))
    for m, n, k, bits, size in itertools.product(*(listed(group[key]) for key in keys)):
        check_value("bits", bits, (4, 8))
        label, configs = group.get("name", ""), group.get("configs", [])
        is_float8 = group.get("float8", False)
        yield _workload(suite, label, dtype, m, n, k, bits, size, configs, is_float8)


def _workload(suite, label, dtype, m, n, k, bits, size, configs, is_float8) -> Workload:
    element_type = DTYPES[dtype][0]
    qtype, size = f"int{bits}", size or k

    def pack(q, scale):
        return jax_tcgemm.pack_weights(q, scale, group_size=size, dtype=qtype)

    q_type = jax.ShapeDtypeStruct((k, n), qtype)
    scale_type = jax.ShapeDtypeStruct((k // size, n), element_type)
    example = jax.eval_shape(pack, q_type, scale_type)
    x_type = jax.ShapeDtypeStruct((m, k), element_type)

    def quantized(x):
        """What ours is given in place of x if that has 8 bits: values, a scale for each row."""
        if not is_float8:
            return ()
        q = jax_tcgemm.quantize(x, block=(1, k))
        return q.qvalue, q.scale

    operands = (
        x_type,
        *jax.tree.leaves(example),
        q_type,
        scale_type,
        jax.ShapeDtypeStruct((k, n), element_type),
        *jax.eval_shape(quantized, x_type),
    )

    def draw(key):
        of_x, of_w = jax.random.split(key)
        x = reference.random(of_x, (m, k), element_type)
        q, scale = reference.random_quantized(of_w, (k, n), bits, size, element_type)
        packed = jax.jit(pack)(q, scale)
        w = jax.jit(lambda packed: packed.dequantize(element_type))(packed)
        of_x = jax.jit(quantized)(x)
        if of_x:
            x = (of_x[0].astype(jnp.float32) * of_x[1]).astype(element_type)
        return x, *jax.tree.leaves(packed), q.astype(qtype), scale, w, *of_x

    def packed_of(values, scales):
        return jax.tree.unflatten(jax.tree.structure(example), (values, scales))

    def packed(x, values, scales, *_, **how):
        return jax_tcgemm.matmul(x, packed_of(values, scales), **how)

    def ours(x, values, scales, q, scale, w, *of_x, **how):
        if of_x:
            x = jax_tcgemm.QuantizedArray(*of_x)
            how["preferred_element_type"] = element_type
        return packed(x, values, scales, **how)

    def by_xla(x, values, scales, q, scale, w, *_):
        wide = q.astype(x.dtype).reshape(k // size, size, n) * scale[:, None]
        return jnp.matmul(x, wide.reshape(k, n))

    def exact(x, values, scales, q, scale, w, *of_x):
        if of_x:
            x = of_x[0].astype(x.dtype) * of_x[1].astype(x.dtype)
        bytes_of = (each.astype(jnp.uint8) for each in (values, scales))
        return jnp.matmul(x, packed_of(*bytes_of).dequantize(x.dtype), precision="highest")

    def plain(x, values, scales, q, scale, w, *_):
        return jax_tcgemm.matmul(x, w)

    sizes = {"m": m, "n": n, "k": k, "bits": bits, "group": size}
    packed_bytes = sum(x.size for x in jax.tree.leaves(example))
    return Workload(
        suite=suite,
        label=label,
        dtype=dtype,
        shape=f"{m}×{n}×{k} {qtype} in groups of {size}" + ", x of 8 bits" * is_float8,
        sizes=sizes,
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
    )
