"""Generates tokens with a mixture of experts of gpt-oss's shape, whose experts are in MXFP4.

    pip install 'jax_tcgemm[test]'
    python examples/serve_moe.py                              # seconds on two CPU cores
    python examples/serve_moe.py --size 20b --weights mxfp4,bf16 --batch 1,16    # a GPU with 60 GB
    python examples/serve_moe.py --size 120b --batch 16                          # a GPU with 80 GB

The weights are random. As in gpt-oss, the experts are in MXFP4 and the other weights in bfloat16;
no bfloat16 copy of the experts is made. `--weights bf16` dequantizes the same experts to bfloat16.
Attention has grouped KV heads and learned sinks; rotary embeddings and sliding windows are left
out. A KV cache holds the keys and values of earlier tokens. The example prints tokens per second
and the bytes of the weights.
"""

import dataclasses
import functools
import json
import math
import pathlib
import time
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from jax import lax
from rich.console import Console

import jax_tcgemm


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a decoder; `hidden` is that of one expert."""

    layers: int
    width: int
    experts: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocabulary: int


SIZES = {
    "tiny": Size(2, 128, 16, 4, 2, 32, 96, 500),
    "20b": Size(24, 2880, 32, 64, 8, 64, 2880, 201088),
    "120b": Size(36, 2880, 128, 64, 8, 64, 2880, 201088),
}
# What becomes of a packed weight.
WEIGHTS = {"mxfp4": lambda w: w, "bf16": lambda w: w.dequantize(jnp.bfloat16)}
EXPERTS_PER_TOKEN = 4
GROUP = 32
LIMIT, SLOPE = 7, 1.702


def separated(x):
    """Columns that are a gate and an up by turns, as in gpt-oss: (..., 2n) to (..., 2, n)."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2)


def make_expert(key, k: int, n: int, gate_up: bool = False) -> jax_tcgemm.PackedWeight:
    """Random MXFP4 weight of shape (k, n), or (k, 2, n / 2), with elements of order k^-0.5."""
    of_q, of_scale = jax.random.split(key)
    q = jax.random.bits(of_q, (k, n), jnp.uint8) >> 4
    exponent = 125 - round(math.log2(k) / 2)
    scale = jax.random.randint(of_scale, (k // GROUP, n), exponent, exponent + 2)
    q, scale = (separated(x) if gate_up else x for x in (q, scale.astype(jnp.uint8)))
    scale = lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
    return jax_tcgemm.pack_weights(q, scale, group_size=GROUP, dtype="float4_e2m1fn")


def random(key, *shape, scale=1.0):
    """Normal numbers in bfloat16."""
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale)


@functools.partial(jax.jit, static_argnums=(1, 2))
def make_layer(key, size: Size, weights: str) -> dict:
    """The weights of one layer."""
    d, wide = size.width, size.heads * size.head_width
    qkv = wide + 2 * size.kv_heads * size.head_width
    keys = iter(jax.random.split(key, 12))

    def experts(k, n, gate_up=False):
        # One expert after the other, because packing takes memory.
        def make(key):
            return WEIGHTS[weights](make_expert(key, k, n, gate_up))

        return lax.map(make, jax.random.split(next(keys), size.experts))

    def linear(k, n):
        return random(next(keys), k, n, scale=k**-0.5), random(next(keys), n, scale=0.1)

    return {
        "attention_norm": jnp.ones(d),
        "qkv": linear(d, qkv),
        "out": linear(wide, d),
        "sinks": jax.random.normal(next(keys), (size.heads,)),
        "experts_norm": jnp.ones(d),
        "router": linear(d, size.experts),
        "up": experts(d, 2 * size.hidden, gate_up=True),
        "up_bias": separated(random(next(keys), size.experts, 2 * size.hidden, scale=0.1)),
        "down": experts(size.hidden, d),
        "down_bias": random(next(keys), size.experts, d, scale=0.1),
    }


def make_params(size: Size, key, weights: str) -> dict:
    """Random weights, the same for both kinds."""
    of_embedding, of_head, *of_layers = jax.random.split(key, 2 + size.layers)
    make = jax.jit(random, static_argnums=(1, 2), static_argnames="scale")
    return {
        "layers": [make_layer(key, size, weights) for key in of_layers],
        "embedding": make(of_embedding, size.vocabulary, size.width),
        "norm": jnp.ones(size.width),
        "head": make(of_head, size.width, size.vocabulary, scale=size.width**-0.5),
    }


def rms_norm(x, weight):
    """RMSNorm over the features of each token."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return (wide * scale * weight).astype(x.dtype)


def attention(q, k, v, sinks, position):
    """Attention of one token per sequence; q: (batch, KV heads, heads of each, head width).

    The sink of a head is a logit that takes part in the softmax and has no value.
    """
    wide = jnp.float32
    logits = jnp.sum(q[:, :, :, None].astype(wide) * k[:, :, None].astype(wide), -1)
    seen = jnp.arange(k.shape[2]) <= position
    logits = jnp.where(seen, logits * q.shape[-1] ** -0.5, -jnp.inf)
    sinks = jnp.broadcast_to(sinks.reshape(q.shape[1:3])[..., None], (*q.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate((logits, sinks), -1))[..., :-1]
    return jnp.sum(weights[..., None] * v[:, :, None].astype(wide), 3).astype(v.dtype)


def attend(size: Size, position, x, layer, cache):
    """Attention block for one token per sequence: its result and the new KV cache."""
    batch, d = len(x), size.head_width
    qkv = jax_tcgemm.linear(rms_norm(x, layer["attention_norm"]), *layer["qkv"])
    q, kv = jnp.split(qkv, [size.heads * d], -1)
    kv = jnp.moveaxis(kv.reshape(batch, 2, size.kv_heads, 1, d), 1, 0)
    cache = lax.dynamic_update_slice_in_dim(cache, kv, position, 3)
    q = q.reshape(batch, size.kv_heads, -1, d)
    mixed = attention(q, *cache, layer["sinks"], position)
    return jax_tcgemm.linear(mixed.reshape(batch, -1), *layer["out"], residual=x), cache


def clipped_swiglu(gate, up, gate_bias, up_bias):
    """Gate of gpt-oss's experts, an epilogue of both products."""
    gate = jnp.minimum(gate + gate_bias, LIMIT)
    up = jnp.clip(up + up_bias, -LIMIT, LIMIT)
    return ((up + 1) * gate * jax.nn.sigmoid(SLOPE * gate)).astype(jnp.bfloat16)


def top_experts(logits, count: int):
    """Return the largest logits of each token and their experts, as `lax.top_k` does.

    Comparisons of all pairs of experts are two kernels, where XLA sorts by four.
    """
    expert = jnp.arange(logits.shape[-1])
    own, other = logits[..., None], logits[:, None]
    is_before = (other > own) | ((other == own) & (expert < expert[:, None]))
    is_chosen = jnp.sum(is_before, -1)[:, None] == jnp.arange(count)[:, None]
    chosen = jnp.sum(jnp.where(is_chosen, logits[:, None], 0), -1)
    return chosen, jnp.sum(jnp.where(is_chosen, expert, 0), -1)


def sort_by_expert(experts, num_experts: int):
    """Sort pairs of a token and an expert by expert, in a stable order.

    Comparisons of all pairs are two kernels, where XLA sorts and counts in about ten; with
    thousands of pairs, `jnp.argsort` and `jnp.bincount` are faster.

    Args:
      experts: expert of each pair, (pairs,).
      num_experts: number of experts.

    Returns:
      The row of each pair, the pair of each row, and the number of rows of each expert.
    """
    pair = jnp.arange(experts.size)
    is_same = experts == experts[:, None]
    is_before = (experts < experts[:, None]) | (is_same & (pair < pair[:, None]))
    row = jnp.sum(is_before, 1)
    order = jnp.sum(jnp.where(row[:, None] == pair, pair[:, None], 0), 0)
    return row, order, jnp.sum(experts[:, None] == jnp.arange(num_experts), 0)


def mixture(size: Size, x, layer):
    """Sum of the chosen experts' outputs, weighted by the router."""
    logits = jax_tcgemm.linear(x, *layer["router"], preferred_element_type=jnp.float32)
    chosen, experts = top_experts(logits, EXPERTS_PER_TOKEN)
    weights = jax.nn.softmax(chosen)

    # One row for each pair of a token and one of its experts, sorted by expert.
    row, order, sizes = sort_by_expert(experts.ravel(), size.experts)
    hidden = jax_tcgemm.gated_ragged_linear(
        x,
        layer["up"],
        sizes,
        gather_indices=order // EXPERTS_PER_TOKEN,
        epilogue=clipped_swiglu,
        epilogue_operands=tuple(layer["up_bias"][:, i, None] for i in (0, 1)),
    )
    rows = jax_tcgemm.ragged_dot(hidden, layer["down"], sizes, bias=layer["down_bias"])
    return jax_tcgemm.combine_rows(rows, row.reshape(weights.shape), weights, unique_indices=True)


def decode(size: Size, params, position, tokens, caches):
    """Logits of the next token of each sequence, and the new KV caches."""
    x, updated = params["embedding"][tokens], []
    for layer, cache in zip(params["layers"], caches, strict=True):
        x, cache = attend(size, position, x, layer, cache)
        x += mixture(size, rms_norm(x, layer["experts_norm"]), layer)
        updated.append(cache)
    x = rms_norm(x, params["norm"])
    return jax_tcgemm.matmul(x, params["head"], preferred_element_type="float32"), updated


@functools.partial(jax.jit, static_argnums=(0, 3))
def generate(size: Size, params, tokens, steps: int):
    """The most likely tokens, (steps, batch), and the logits of the last step."""
    shape = (2, len(tokens), size.kv_heads, steps, size.head_width)
    caches = [jnp.zeros(shape, jnp.bfloat16) for _ in params["layers"]]

    def step(carry, position):
        tokens, caches, _ = carry
        logits, caches = decode(size, params, position, tokens, caches)
        tokens = jnp.argmax(logits, -1)
        return (tokens, caches, logits), tokens

    carry = (tokens, caches, jnp.zeros((len(tokens), size.vocabulary)))
    (_, _, logits), generated = lax.scan(step, carry, jnp.arange(steps))
    return generated, logits


def serve(size: Size, params, weights: str, batch: int, steps: int, console: Console) -> dict:
    """Generate tokens, measure, and return what was generated beside the measurements."""
    tokens = jnp.arange(batch) % size.vocabulary
    jax.block_until_ready(generate(size, params, tokens, steps))
    start = time.perf_counter()
    generated, logits = jax.block_until_ready(generate(size, params, tokens, steps))
    seconds = time.perf_counter() - start
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    console.print(
        f"{weights}: {batch * steps / seconds:.1f} tokens/s of {batch} sequences, "
        f"{1e3 * seconds / steps:.2f} ms per step, {num_bytes / 1e9:.4g} GB of weights"
    )
    return {
        "tokens_per_second": batch * steps / seconds,
        "bytes": num_bytes,
        "tokens": generated,
        "logits": logits,
    }


def main(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "tiny",
    weights: Annotated[
        str, typer.Option(help=f"Of {', '.join(WEIGHTS)}, comma-separated.")
    ] = "mxfp4",
    batch: Annotated[
        str, typer.Option(help="Sequences that are generated at once, comma-separated.")
    ] = "1",
    steps: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 64,
    layers: Annotated[
        int | None, typer.Option(help="Layers; those of the size if left out.")
    ] = None,
    out: Annotated[pathlib.Path | None, typer.Option(help="Write a record to this file.")] = None,
):
    """Serve random experts in MXFP4 or bfloat16."""
    shape, console, measured = SIZES[size], Console(), []
    shape = dataclasses.replace(shape, layers=layers or shape.layers)
    for name in weights.split(","):
        params = make_params(shape, jax.random.key(0), name)
        for number in map(int, batch.split(",")):
            served = serve(shape, params, name, number, steps, console)
            own = {key: served[key] for key in ("tokens_per_second", "bytes")}
            measured.append({"weights": name, "batch": number, **own})
        del params
    if out is not None:
        device = jax.devices()[0].device_kind
        record = {"size": size, "layers": shape.layers, "steps": steps, "measured": measured}
        record |= {"device": device, "jax": jax.__version__}
        out.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
