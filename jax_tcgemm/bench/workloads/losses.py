"""Workloads of a language model's head and its loss, with the gradients of the mean.

A group has these keys::

    tokens, features, vocabulary      each may be a list
    budget                            seconds that a contender may take where `--budget` gives less

`fused` is `linear_cross_entropy`, `recompute` the same with that; `logits` the expression of whole
logits by XLA, and `chunks` that of 1024 tokens at a time under `jax.checkpoint`, both jitted. The
losses alone, `forward` by us and `logits_forward` by XLA, are timed beside them. Whole logits that
fit no device are left out. Records have the memory that each takes, and what of it is temporary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload, check_keys, listed

_CHUNK = 1024
# What whole logits, those in float32 and their gradient may take, in bytes.
_MOST_BYTES = 6e10


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key.
    """
    keys = ("tokens", "features", "vocabulary")
    check_keys(f"a group of {suite}", group, ("name", *keys, "budget"))
    for extents in itertools.product(*(listed(group[key]) for key in keys)):
        yield _workload(suite, group.get("name", ""), dtype, *extents, group.get("budget", 0.0))


def _losses(x, w, labels, precision=None) -> jax.Array:
    """Losses of tokens from whole logits, as models have them: rounded to the operands' dtype."""
    z = lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision)
    z = z.astype(jnp.promote_types(x.dtype, jnp.float32))
    at_label = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
    return jax.nn.logsumexp(z, -1) - at_label


def _reference(x, w, labels) -> jax.Array:
    """The mean of them from logits in float32."""
    return _in_chunks(*(a.astype(jnp.float32) for a in (x, w)), labels, precision="highest")


def _in_chunks(x, w, labels, precision=None) -> jax.Array:
    """The mean of them by chunks, whose logits are made again for gradients."""
    size = min(_CHUNK, len(x))
    split = x.reshape(-1, size, x.shape[1]), labels.reshape(-1, size)
    one = jax.checkpoint(lambda each: _losses(each[0], w, each[1], precision))
    return jnp.mean(lax.map(one, split))


def _workload(suite, label, dtype, tokens, features, vocabulary, budget_s) -> Workload:
    element_type = DTYPES[dtype][0]
    operands = (
        jax.ShapeDtypeStruct((tokens, features), element_type),
        jax.ShapeDtypeStruct((vocabulary, features), element_type),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )

    def draw(key):
        x, w = (
            reference.random(each, like.shape, like.dtype)
            for each, like in zip(jax.random.split(key), operands, strict=False)
        )
        labels = jax.random.randint(key, (tokens,), 0, vocabulary, jnp.int32)
        return x, w * jnp.asarray(features**-0.5, w.dtype), labels

    def both(f):
        return jax.value_and_grad(f, (0, 1))

    def of_logits(*given):
        return jnp.mean(_losses(*given))

    loss = jax_tcgemm.linear_cross_entropy
    fits = 6 * tokens * vocabulary <= _MOST_BYTES
    return Workload(
        suite=suite,
        label=label,
        dtype=dtype,
        shape=f"{tokens}×{features}→{vocabulary}",
        sizes={"tokens": tokens, "features": features, "vocabulary": vocabulary},
        operands=operands,
        ours={"fused": both(loss), "recompute": both(functools.partial(loss, recompute=True))},
        peers=({"logits": both(of_logits)} if fits else {}) | {"chunks": both(_in_chunks)},
        parts={"forward": loss} | ({"logits_forward": of_logits} if fits else {}),
        reference=both(_reference),
        # Gradients of logits, what they are multiplied by, and the result are rounded.
        tolerance=4 * float(jnp.finfo(element_type).eps) + 1e-4,
        flops=6 * tokens * features * vocabulary,
        draw=draw,
        budget_s=budget_s,
    )
