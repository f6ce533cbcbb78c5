"""Random grouped, quantized and packed products."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench.random_problems.problem import (
    Problem,
    Random,
    scaled_draw,
    struct,
    tolerance_of,
)


def _ragged(r: Random) -> Problem:
    m, n, k = r.extent(64, 8192), r.extent(64, 2048, 64), r.extent(64, 2048, 64)
    groups = r.one_of(4, 8, 16)
    operands = struct((m, k), "bfloat16"), struct((groups, k, n), "bfloat16")
    operands = *operands, struct((groups,), "int32")
    two = scaled_draw(operands[:2], k)
    shares = np.random.default_rng([m, n, k]).dirichlet(np.full(groups, 2.0))
    sizes = np.diff(np.rint(np.cumsum([0, *shares]) * m)).astype(np.int32)

    def reference(x, w, sizes):
        groups = np.split(x, np.cumsum(sizes)[:-1])
        return np.concatenate([rows @ matrix for rows, matrix in zip(groups, w, strict=True)])

    return Problem(
        "",
        f"ragged_dot {m}×{n}×{k}, {groups} groups, bfloat16",
        operands,
        jax_tcgemm.ragged_dot,
        lax.ragged_dot,
        reference,
        tolerance_of("bfloat16", "bfloat16", k),
        2.0 * m * n * k,
        lambda key: (*two(key), jnp.asarray(sizes)),
    )


def _quantized(r: Random) -> Problem:
    """8-bit floats with per-tensor, per-row or block scales; with those XLA multiplies bfloat16."""
    m, n, k = r.extent(1, 8192), r.extent(128, 8192, 128), r.extent(128, 8192, 128)
    how = r.one_of("tensor", "rows", "blocks")
    blocks = {"tensor": (None, None), "rows": ((1, k), (1, k)), "blocks": ((1, 128), (128, 128))}
    of_x, of_w = blocks[how]
    bf16 = jnp.bfloat16

    def draw(key):
        x, w = scaled_draw([struct((m, k), bf16), struct((n, k), bf16)], k)(key)
        x, w = (jax_tcgemm.quantize(a, block=b) for a, b in ((x, of_x), (w, of_w)))
        return x.qvalue, w.qvalue, x.scale, w.scale

    shapes = jax.eval_shape(draw, jax.random.key(0))

    def wrapped(x, w, sx, sw):
        return (jax_tcgemm.QuantizedArray(q, s) for q, s in ((x, sx), (w, sw)))

    def plain(x, w, sx, sw):
        if how == "blocks":
            x, w = (jax_tcgemm.dequantize(a).astype(bf16) for a in wrapped(x, w, sx, sw))
            return x @ w.T
        product = lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return (product * sx * sw.T).astype(bf16)

    def reference(x, w, sx, sw):
        def full(q, s):
            return q * s.repeat(q.shape[0] // s.shape[0], 0).repeat(q.shape[1] // s.shape[1], 1)

        return full(x, sx) @ full(w, sw).T

    def ours(*given):
        x, w = wrapped(*given)
        return jax_tcgemm.matmul(x, w.mT, preferred_element_type=bf16)

    return Problem(
        "",
        f"float8 scales of {how} {m}×{n}×{k}",
        tuple(shapes),
        ours,
        plain,
        reference,
        2.0**-6,  # Dequantized operands are rounded to bfloat16.
        2.0 * m * n * k,
        draw,
    )


def _packed(r: Random) -> Problem:
    """Weights of 4 bits beside a bfloat16 product of bfloat16 weights."""
    m, n, k = r.extent(1, 4096), r.extent(512, 16384, 128), r.extent(512, 16384, 128)
    bf16, group = jnp.bfloat16, 128
    x = struct((m, k), bf16)

    def pack(key):
        q = jax.random.randint(key, (k, n), -8, 8, jnp.int8)
        scale = jax.random.uniform(key, (k // group, n), bf16, 0.01, 0.02)
        return jax_tcgemm.pack_weights(q, scale, group_size=group, dtype="int4"), q, scale

    packed = jax.eval_shape(lambda key: pack(key)[0], jax.random.key(0))
    leaves, tree = jax.tree.flatten(packed)

    def draw(key):
        weight, q, scale = pack(key)
        dense = (q.reshape(-1, group, n) * scale[:, None].astype(jnp.float32)).reshape(k, n)
        drawn = jax.random.normal(key, x.shape, bf16)
        return drawn, dense.astype(bf16), *jax.tree.leaves(weight)

    return Problem(
        "",
        f"int4 weights {m}×{n}×{k}",
        (x, struct((k, n), bf16), *leaves),
        lambda x, w, *packed: jax_tcgemm.matmul(x, jax.tree.unflatten(tree, packed)),
        lambda x, w, *packed: x @ w,
        lambda x, w, *packed: x @ w,
        2.0**-6,
        2.0 * m * n * k,
        draw,
    )


ENCODED_PRODUCTS: dict[str, Callable[[Random], Problem]] = {
    "ragged": _ragged,
    "float8": _quantized,
    "int4 weights": _packed,
}
