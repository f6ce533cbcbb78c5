"""Random layers, epilogues, gradients and losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_tcgemm
from jax_tcgemm.bench.random_problems.problem import (
    Problem,
    Random,
    scaled_draw,
    struct,
    tolerance_of,
)
from jax_tcgemm.bench.workloads.functions import ELEMENTWISE

_NUMPY_ACTIVATIONS = {
    "relu": lambda z: np.maximum(z, 0),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu_tanh": lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
}
_ACTIVATIONS = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def _layer_operands(r: Random):
    multiple = r.one_of(1, 8, 64)
    m, n, k = r.extent(1, 8192), *(r.extent(8, 8192, multiple) for _ in range(2))
    dtype = r.one_of("bfloat16", "bfloat16", "float32")
    operands = struct((m, k), dtype), struct((k, n), dtype), struct((n,), dtype)
    return m, n, k, dtype, operands


def _linear(r: Random) -> Problem:
    m, n, k, dtype, operands = _layer_operands(r)
    name = r.one_of(None, *_ACTIVATIONS)
    act = _ACTIVATIONS.get(name, lambda z: z)
    on_host = _NUMPY_ACTIVATIONS.get(name, lambda z: z)
    return Problem(
        "",
        f"linear {m}×{n}×{k} bias {name} {dtype}",
        operands,
        lambda x, w, b: jax_tcgemm.linear(x, w, b, activation=name),
        lambda x, w, b: act(x @ w + b),
        lambda x, w, b: on_host(x @ w + b),
        2 * tolerance_of(dtype, dtype, k, tf32=dtype == "float32"),
        2.0 * m * n * k,
        scaled_draw(operands, k),
    )


def _gated(r: Random) -> Problem:
    m, n, k, dtype, _ = _layer_operands(r)
    operands = struct((m, k), dtype), struct((k, 2, n), dtype)
    name = r.one_of(*_ACTIVATIONS)

    def plain(x, w):
        z = jnp.einsum("mk,kpn->mpn", x, w)
        return _ACTIVATIONS[name](z[:, 0]) * z[:, 1]

    return Problem(
        "",
        f"gated {m}×{n}×{k} {name} {dtype}",
        operands,
        lambda x, w: jax_tcgemm.gated_linear(x, w, activation=name),
        plain,
        lambda x, w: _NUMPY_ACTIVATIONS[name](x @ w[:, 0]) * (x @ w[:, 1]),
        3 * tolerance_of(dtype, dtype, k, tf32=dtype == "float32"),
        4.0 * m * n * k,
        scaled_draw(operands, k),
    )


# Functions f of the accumulator z, by jax.numpy or numpy, and how much each amplifies an error of z
# relative to the largest value: a bound of max |f'| max |z| / max |f| for |z| of up to 5.
_FUNCTIONS = {
    "sin": (ELEMENTWISE["sin"], 5),
    "cos": (ELEMENTWISE["cos"], 5),
    "mish": (ELEMENTWISE["mish"], 4),
    "log-cosh": (ELEMENTWISE["log-cosh"], 4),
    "pow": (ELEMENTWISE["pow"], 4),
    "exp": (lambda z, xp: xp.exp(-z * z), 5),
    "clip": (lambda z, xp: xp.clip(3 * z, -1, 1), 15),
}


def _epilogue(r: Random) -> Problem:
    m, n, k, dtype, operands = _layer_operands(r)
    name = r.one_of(*_FUNCTIONS)
    function, amplification = _FUNCTIONS[name]

    def follows(acc, bias):
        return function(acc + bias, jnp).astype(dtype)

    return Problem(
        "",
        f"epilogue {name} {m}×{n}×{k} {dtype}",
        operands,
        lambda x, w, b: jax_tcgemm.matmul(x, w, epilogue=follows, epilogue_operands=(b,)),
        lambda x, w, b: follows(jnp.matmul(x, w, preferred_element_type=jnp.float32), b),
        lambda x, w, b: function(x @ w + b, np),
        amplification * tolerance_of(dtype, dtype, k, tf32=dtype == "float32"),
        2.0 * m * n * k,
        scaled_draw(operands, k),
    )


def _on_host(function: Callable) -> Callable:
    """Run a function by XLA's CPU backend in float64: for gradients, which NumPy does not have."""

    def run(*operands):
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return jax.tree.map(np.asarray, jax.jit(function)(*map(jnp.asarray, operands)))

    return run


def _gradients(r: Random) -> Problem:
    m, n, k, dtype, operands = _layer_operands(r)
    name = r.one_of(*_ACTIVATIONS)

    def both(layer):
        return jax.grad(lambda *given: jnp.mean(jnp.square(layer(*given))), (0, 1, 2))

    plain = both(lambda x, w, b: _ACTIVATIONS[name](x @ w + b))
    return Problem(
        "",
        f"gradients of linear {m}×{n}×{k} {name} {dtype}",
        operands,
        both(lambda x, w, b: jax_tcgemm.linear(x, w, b, activation=name)),
        plain,
        _on_host(plain),
        8 * tolerance_of(dtype, dtype, k, tf32=dtype == "float32") + 8 * 2**-8,
        6.0 * m * n * k,
        scaled_draw(operands, k),
    )


def _loss(r: Random) -> Problem:
    m, k, n = r.extent(16, 4096), r.extent(64, 2048, 8), r.extent(1000, 65536)
    operands = struct((m, k), "bfloat16"), struct((n, k), "bfloat16"), struct((m,), "int32")
    two = scaled_draw(operands[:2], k)

    def draw(key):
        return *two(key), jax.random.randint(key, (m,), 0, n, jnp.int32)

    def plain(x, w, labels):
        z = (x @ w.T).astype(jnp.float32)
        at_label = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(z, -1) - at_label)

    def reference(x, w, labels):
        z = x @ w.T
        largest = z.max(-1)
        sums = np.exp(z - largest[:, None]).sum(-1)
        return np.mean(np.log(sums) + largest - z[np.arange(m), labels])

    return Problem(
        "",
        f"cross entropy {m}×{k}→{n} bfloat16",
        operands,
        jax_tcgemm.linear_cross_entropy,
        plain,
        reference,
        2.0**-9,
        2.0 * m * n * k,
        draw,
    )


LAYERS: dict[str, Callable[[Random], Problem]] = {
    "linear": _linear,
    "gated": _gated,
    "epilogues": _epilogue,
    "gradients": _gradients,
    "losses": _loss,
}
