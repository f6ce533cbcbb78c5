"""Writes tokens with a decoder whose weights are of 4 bits, beside the same weights of 16.

    pip install 'jax_tcgemm[test]'
    python examples/serve_int4.py                    # seconds on two CPU cores
    python examples/serve_int4.py --size 8b          # a GPU with 40 GB

The shapes are Llama-3's, the weights random: what is to be seen is the time. Each matrix is rounded
to 4 bits in groups of 128 rows and packed by `jax_tcgemm.pack_weights`. The other weights are what
the packed ones stand for, in bfloat16. Each layer has a cache of keys and values, which a token's
are written into where they belong. Printed: how far the scores of both are apart, and tokens a
second.
"""

import dataclasses
import functools
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
    """A decoder: heads of attention share keys and values."""

    layers: int
    width: int
    heads: int
    shared_heads: int
    hidden: int
    vocabulary: int

    @property
    def head_width(self) -> int:
        """Of one head."""
        return self.width // self.heads


SIZES = {
    "test": Size(2, 256, 4, 2, 512, 1000),
    "1b": Size(16, 2048, 32, 8, 8192, 128256),
    "8b": Size(32, 4096, 32, 8, 14336, 128256),
}
GROUP = 128


def pack(w):
    """The nearest integers of 4 bits, in groups of rows."""
    groups = w.astype(jnp.float32).reshape(-1, GROUP, *w.shape[1:])
    scale = (abs(groups).max(1) / 7).astype(jnp.bfloat16)
    q = jnp.round(groups / scale[:, None].astype(jnp.float32)).astype(jnp.int8)
    q = jnp.clip(q, -8, 7).reshape(w.shape)
    return jax_tcgemm.pack_weights(q, scale, group_size=GROUP, dtype="int4")


def matrices(size: Size) -> dict[str, tuple[int, ...]]:
    """Of a layer."""
    attention = (size.heads + 2 * size.shared_heads) * size.head_width
    return {
        "qkv": (size.width, attention),
        "out": (size.width, size.width),
        "up": (size.width, 2, size.hidden),
        "down": (size.hidden, size.width),
    }


def make_params(size: Size, key) -> dict:
    """Random weights, packed."""
    of_embedding, of_head, *of_layers = jax.random.split(key, 2 + size.layers)

    def make(key, shape):
        w = jax.random.normal(key, shape, jnp.bfloat16)
        return pack(w * jnp.asarray(shape[0] ** -0.5, w.dtype))

    @jax.jit
    def make_layer(key):
        shapes = matrices(size)
        keys = jax.random.split(key, len(shapes))
        return {name: make(key, shapes[name]) for name, key in zip(shapes, keys, strict=True)}

    return {
        "layers": [make_layer(key) for key in of_layers],
        "embedding": jax.random.normal(of_embedding, (size.vocabulary, size.width), jnp.bfloat16),
        "head": jax.jit(make, static_argnums=1)(of_head, (size.width, size.vocabulary)),
    }


def dequantized(params: dict) -> dict:
    """The same weights in bfloat16."""

    def is_packed(x):
        return isinstance(x, jax_tcgemm.PackedWeight)

    return jax.tree.map(lambda x: x.dequantize() if is_packed(x) else x, params, is_leaf=is_packed)


def normalized(x):
    """Of each token's features the mean square is 1."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def layer_of(size: Size, position, x, layer, cache):
    """One layer for one token of each sequence; `cache` has keys and values of those before."""
    batch, d = len(x), size.head_width
    qkv = jax_tcgemm.linear(normalized(x), layer["qkv"])
    q, own = jnp.split(qkv, [size.width], -1)
    own = jnp.moveaxis(own.reshape(batch, 2, size.shared_heads, 1, d), 1, 0)
    cache = lax.dynamic_update_slice_in_dim(cache, own, position, 3)
    mixed = attention(q.reshape(batch, size.shared_heads, -1, d), *cache, position)
    x = jax_tcgemm.linear(mixed.reshape(batch, size.width), layer["out"], residual=x)
    hidden = jax_tcgemm.gated_linear(normalized(x), layer["up"])
    return jax_tcgemm.linear(hidden, layer["down"], residual=x), cache


def attention(q, k, v, position):
    """What a token of each sequence gathers; q: (batch, shared heads, heads of each, width).

    Of one token these are sums, which XLA makes of a few kernels, and no products of matrices.
    """
    wide = jnp.float32
    scores = jnp.sum(q[:, :, :, None].astype(wide) * k[:, :, None].astype(wide), -1)
    seen = jnp.arange(k.shape[2]) <= position
    weights = jax.nn.softmax(jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf))
    return jnp.sum(weights[..., None] * v[:, :, None].astype(wide), 3).astype(v.dtype)


def scores_of(size: Size, params, position, tokens, caches):
    """Scores of what comes after the tokens, one of each sequence, and the caches with these."""
    x = params["embedding"][tokens]
    written = []
    for layer, cache in zip(params["layers"], caches, strict=True):
        x, cache = layer_of(size, position, x, layer, cache)
        written.append(cache)
    scores = jax_tcgemm.matmul(normalized(x), params["head"], preferred_element_type="float32")
    return scores, written


@functools.partial(jax.jit, static_argnums=(0, 3))
def write(size: Size, params, tokens, steps: int):
    """The most likely tokens, one after the other: (steps, batch); and the first scores."""
    shape = (2, len(tokens), size.shared_heads, steps, size.head_width)
    caches = [jnp.zeros(shape, jnp.bfloat16) for _ in params["layers"]]

    def one(carry, position):
        tokens, caches, first = carry
        scores, caches = scores_of(size, params, position, tokens, caches)
        first = jnp.where(position == 0, scores, first)
        tokens = jnp.argmax(scores, -1)
        return (tokens, caches, first), tokens

    first = jnp.zeros((len(tokens), size.vocabulary))
    (_, _, first), written = lax.scan(one, (tokens, caches, first), jnp.arange(steps))
    return written, first


def serve(size: str, batch: int, steps: int, console: Console) -> dict:
    """Writes with both, and measures."""
    shape = SIZES[size]
    params = make_params(shape, jax.random.key(0))
    tokens = jnp.arange(batch) % shape.vocabulary
    record, scores = {}, {}
    for name, own in (("int4", params), ("bfloat16", jax.jit(dequantized)(params))):
        jax.block_until_ready(write(shape, own, tokens, steps))
        start = time.perf_counter()
        _, scores[name] = jax.block_until_ready(write(shape, own, tokens, steps))
        seconds = time.perf_counter() - start
        gigabytes = sum(x.nbytes for x in jax.tree.leaves(own)) / 1e9
        record[name] = {"tokens_per_second": batch * steps / seconds, "gigabytes": gigabytes}
        console.print(
            f"{name:>8}: {batch * steps / seconds:8.1f} tokens/s of {batch} sequences, "
            f"{1e3 * seconds / steps:.2f} ms each, {gigabytes:.2f} GB"
        )
        del own
    difference = jnp.linalg.norm(scores["int4"] - scores["bfloat16"])
    record["difference"] = float(difference / jnp.linalg.norm(scores["bfloat16"]))
    console.print(f"scores differ by {record['difference']:.2g} of their norm")
    return record


def main(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "test",
    batch: Annotated[int, typer.Option(help="Sequences that are written at once.")] = 1,
    steps: Annotated[int, typer.Option(help="Tokens of each.")] = 64,
):
    """Serves random weights of 4 bits."""
    serve(size, batch, steps, Console())


if __name__ == "__main__":
    typer.run(main)
