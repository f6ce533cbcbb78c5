"""A training step of one transformer layer in plain jnp, for the demo, which only traces it."""

import jax
import jax.numpy as jnp

TOKENS, WIDTH, HEADS, HIDDEN, VOCABULARY = 2048, 1024, 16, 4096, 32000
_LEARNING_RATE = 1e-3

# Shapes of the parameters.
_SHAPES = {
    "attention_norm": (WIDTH,),
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "mlp_norm": (WIDTH,),
    "up": (WIDTH, HIDDEN),
    "up_bias": (HIDDEN,),
    "down": (HIDDEN, WIDTH),
    "down_bias": (WIDTH,),
    "head": (WIDTH, VOCABULARY),
}


def arguments() -> tuple:
    """Return shapes and dtypes of parameters, inputs and labels of `train_step`."""
    params = {name: jax.ShapeDtypeStruct(x, jnp.bfloat16) for name, x in _SHAPES.items()}
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
    return params, x, jax.ShapeDtypeStruct((TOKENS,), jnp.int32)


def train_step(params, x, labels):
    """One step of gradient descent: new parameters and the loss."""
    value, gradients = jax.value_and_grad(_loss)(params, x, labels)
    return jax.tree.map(lambda p, g: p - _LEARNING_RATE * g, params, gradients), value


def _loss(params, x, labels):
    logits = (_layer(params, x) @ params["head"]).astype(jnp.float32)
    of_labels = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -jnp.mean(of_labels)


def _layer(params, x):
    """Causal attention and an MLP with gelu, each added to its input."""
    x = x + _attention(_norm(x, params["attention_norm"]) @ params["qkv"]) @ params["out"]
    hidden = _norm(x, params["mlp_norm"]) @ params["up"] + params["up_bias"]
    return x + jax.nn.gelu(hidden) @ params["down"] + params["down_bias"]


def _attention(qkv):
    q, k, v = (x.reshape(TOKENS, HEADS, -1).swapaxes(0, 1) for x in jnp.split(qkv, 3, axis=1))
    scores = (q @ k.swapaxes(1, 2)).astype(jnp.float32) * (WIDTH // HEADS) ** -0.5
    is_past = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    weights = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf))
    return (weights.astype(v.dtype) @ v).swapaxes(0, 1).reshape(TOKENS, WIDTH)


def _norm(x, scale):
    wide = x.astype(jnp.float32)
    variance = jnp.mean(wide * wide, axis=1, keepdims=True)
    return (wide * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype) * scale
