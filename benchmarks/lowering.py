"""How long a training step takes to be traced and lowered, with `accelerate` and without it.

    python benchmarks/lowering.py OUT.json

Figures are seconds of the processor, for `jax.jit(step).trace(...)` and `.lower()` for CUDA
together: no GPU is needed. "first" is the first time in a fresh process, whose cache of compiled
kernels another one has filled; "again" is the median of others in the same process, each of a new
function, so that JAX knows nothing of it. Layers are written one by one, without a `scan`.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS = 24, 1024, 16, 32768, (8, 1024)
MODELS = ("linen GPT", "linen Llama", "jnp GPT", "jnp Llama")
AGAIN = 5


def linen(is_llama: bool):
    """A language model of Flax, and the shapes of its parameters."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    dense = functools.partial(nn.Dense, dtype=jnp.bfloat16, use_bias=not is_llama)
    norm = functools.partial(nn.RMSNorm if is_llama else nn.LayerNorm, dtype=jnp.bfloat16)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = norm()(x)
            shape = *y.shape[:-1], HEADS, WIDTH // HEADS
            heads = (dense(WIDTH)(y).reshape(shape) for _ in range(3))
            y = jax.nn.dot_product_attention(*heads, is_causal=True)
            x = x + dense(WIDTH)(y.reshape(x.shape))
            y = norm()(x)
            if is_llama:
                return x + dense(WIDTH)(nn.silu(dense(2816)(y)) * dense(2816)(y))
            return x + dense(WIDTH)(nn.gelu(dense(4 * WIDTH)(y)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16)(tokens)
            for _ in range(LAYERS):
                x = Block()(x)
            return dense(VOCABULARY)(norm()(x)).astype(jnp.float32)

    model = Model()
    tokens = jax.ShapeDtypeStruct(TOKENS, jnp.int32)
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), tokens)


def plain(is_llama: bool):
    """The same in JAX alone, of whose program less time goes into Python."""
    import jax
    import jax.numpy as jnp

    hidden = 2816 if is_llama else 4 * WIDTH
    up = ("gate", "up") if is_llama else ("up",)
    shapes = dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH))
    shapes |= dict.fromkeys(up, (WIDTH, hidden)) | {"down": (hidden, WIDTH)}

    def norm(x, scale):
        y = x.astype(jnp.float32)
        if not is_llama:
            y = y - y.mean(-1, keepdims=True)
        return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(
            x.dtype
        ) * scale

    def product(p, name, x):
        y = x @ p[name].astype(x.dtype)
        return y if is_llama else y + p[f"{name} bias"].astype(x.dtype)

    def block(p, x):
        y = norm(x, p["norms"][0].astype(x.dtype))
        shape = *y.shape[:-1], HEADS, WIDTH // HEADS
        heads = (product(p, name, y).reshape(shape) for name in "qkv")
        x = x + product(
            p, "out", jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
        )
        y = norm(x, p["norms"][1].astype(x.dtype))
        if is_llama:
            y = jax.nn.silu(product(p, "gate", y)) * product(p, "up", y)
        else:
            y = jax.nn.gelu(product(p, "up", y))
        return x + product(p, "down", y)

    def apply(params, tokens):
        x = params["embedding"].astype(jnp.bfloat16)[tokens]
        for p in params["blocks"]:
            x = block(p, x)
        return (x @ params["head"].astype(x.dtype)).astype(jnp.float32)

    if not is_llama:
        shapes |= {f"{name} bias": shape[1:] for name, shape in shapes.items()}
    blocks = [shapes | {"norms": (2, WIDTH)} for _ in range(LAYERS)]
    ends = {"embedding": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        ends | {"blocks": blocks},
        is_leaf=is_shape,
    )
    return apply, params


def measure(name: str, is_accelerated: bool) -> dict:
    """Times one model in this process."""
    import jax
    import jax.numpy as jnp
    import optax

    import jax_tcgemm

    apply, params = (linen if name.startswith("linen") else plain)(name.endswith("Llama"))
    tokens = jax.ShapeDtypeStruct(TOKENS, jnp.int32)

    def step(params, tokens, labels):
        def loss(params):
            logits = apply(params, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), value

    def seconds() -> float:
        def new(*args):
            return (jax_tcgemm.accelerate(step) if is_accelerated else step)(*args)

        start = time.process_time()
        jax.jit(new).trace(params, tokens, tokens).lower(lowering_platforms=("cuda",))
        return time.process_time() - start

    first, *again = (seconds() for _ in range(1 + AGAIN))
    return {"first": round(first, 3), "again": round(statistics.median(again), 3)}


def main(out: str) -> None:
    """Measures every model in processes of its own, and writes what was found."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TCGEMM_CACHE_DIR": folder}

        def run(name, is_accelerated):
            arguments = [sys.executable, __file__, "--measure", name, str(is_accelerated)]
            return json.loads(subprocess.run(arguments, env=env, stdout=-1, check=True).stdout)

        for name in MODELS:
            run(name, True)  # compiles kernels
            ours, jaxs = run(name, True), run(name, False)
            ratio = {key: round(ours[key] / jaxs[key], 2) for key in ours}
            found[name] = {"accelerated_s": ours, "plain_s": jaxs, "ratio": ratio}
            print(name, found[name], flush=True)
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"layers": LAYERS, "models": found}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        print(json.dumps(measure(sys.argv[2], sys.argv[3] == "True")))
    else:
        main(sys.argv[1])
