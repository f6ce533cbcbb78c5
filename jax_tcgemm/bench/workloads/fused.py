"""Workloads of fused layers.

Each table of the suite's TOML file has a `kind`, one of those below. Its sizes and its activation
may be lists; there is one workload for each combination.

    linear   m, n, k, activation      f(x w + bias)
    gated    m, n, k, activation      f(x gate) * (x up)
    mlp      tokens, width, hidden, activation, gated: a feed-forward block and all its gradients

`fused` is one call of this library, `bare` its plain product with the epilogue computed by XLA,
`layers` (mlp only) fused layers that JAX differentiates one by one, without the backward pass of
`mlp`, `xla` the expression under jit, and `cublaslt` cuBLASLt's own epilogue.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed
from jax_tcgemm.problem.activations import ACTIVATIONS, canonical_activation


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown kind or key.
    """
    makers = {
        "linear": (_linear, ("m", "n", "k", "activation")),
        "gated": (_gated, ("m", "n", "k", "activation")),
        "mlp": (_mlp, ("tokens", "width", "hidden", "activation", "gated")),
    }
    kind = group.get("kind")
    check_value("kind", kind, makers)
    make, keys = makers[kind]
    check_keys(f"a group of {suite}", group, ("name", "kind", *keys))
    for each in itertools.product(*(listed(group[key]) for key in keys)):
        sizes = dict(zip(keys, each, strict=True))
        yield make(suite, group.get("name", ""), dtype, **sizes)


def _scaled(shapes: dict[str, tuple[int, ...]], dtype) -> Callable:
    """Return a function that draws standard normal operands.

    Operands whose name begins with w are scaled by 1 / sqrt(shape[0]), so that their products with
    normal numbers have unit variance.
    """

    def draw(key):
        for each, (name, shape) in zip(
            jax.random.split(key, len(shapes)), shapes.items(), strict=True
        ):
            x = reference.random(each, shape, dtype)
            yield x * jnp.asarray(shape[0] ** -0.5, dtype) if name.startswith("w") else x

    return draw


def _workload(suite, label, dtype, shape, sizes, shapes, **fields) -> Workload:
    element_type = DTYPES[dtype][0]
    return Workload(
        suite=suite,
        label=label,
        dtype=dtype,
        shape=shape,
        sizes=sizes,
        operands=tuple(jax.ShapeDtypeStruct(s, element_type) for s in shapes.values()),
        draw=_scaled(shapes, element_type),
        **fields,
    )


def _tolerance(dtype: str, roundings: int) -> float:
    """Return the tolerated relative error.

    It is `roundings` times the epsilon of the dtype, plus that of TF32 if it may be used, plus 1e-4
    for accumulation in float32.
    """
    element_type, precision, _ = DTYPES[dtype]
    tf32 = 2.0**-10 if element_type == "float32" and precision == "default" else 0.0
    return roundings * float(jnp.finfo(element_type).eps) + tf32 + 1e-4


def _linear(suite, label, dtype, *, m, n, k, activation) -> Workload:
    f = ACTIVATIONS[canonical_activation("bench", activation)]

    def layer(implementation=None):
        return functools.partial(
            jax_tcgemm.linear, activation=activation, implementation=implementation
        )

    def expression(product):
        return lambda x, w, bias: f(product(x, w) + bias)

    return _workload(
        suite,
        f"{label} bias+{activation}".strip(),
        dtype,
        f"{m}×{n}×{k}",
        {"m": m, "n": n, "k": k},
        {"x": (m, k), "w": (k, n), "bias": (n,)},
        ours={"fused": layer(), "bare": expression(jax_tcgemm.matmul)},
        peers={"xla": expression(jnp.matmul), "cublaslt": layer("cublaslt")},
        reference=expression(functools.partial(jnp.matmul, precision="highest")),
        # XLA's expression rounds the product, the sum and the activation.
        tolerance=_tolerance(dtype, 3),
        flops=2 * m * n * k,
    )


def _gated(suite, label, dtype, *, m, n, k, activation) -> Workload:
    f = ACTIVATIONS[canonical_activation("bench", activation)]

    def expression(product):
        def function(x, weights):
            both = product(x, weights.reshape(k, 2 * n))
            return f(both[:, :n]) * both[:, n:]

        return function

    return _workload(
        suite,
        f"{label} {activation}".strip(),
        dtype,
        f"{m}×2×{n}×{k}",
        {"m": m, "n": n, "k": k},
        {"x": (m, k), "weights": (k, 2, n)},
        ours={
            "fused": functools.partial(jax_tcgemm.gated_linear, activation=activation),
            "bare": expression(jax_tcgemm.matmul),
        },
        peers={"xla": expression(jnp.matmul)},
        reference=expression(functools.partial(jnp.matmul, precision="highest")),
        tolerance=_tolerance(dtype, 3),
        flops=4 * m * n * k,
    )


def _mlp(suite, label, dtype, *, tokens, width, hidden, activation, gated) -> Workload:
    f = ACTIVATIONS[canonical_activation("bench", activation)]
    shapes = {"x": (tokens, width), "g": (tokens, width)}
    if gated:
        shapes |= {"w_up": (width, 2, hidden), "w_down": (hidden, width)}
    else:
        shapes |= {"w_up": (width, hidden), "w_down": (hidden, width)}
        shapes |= {"up_bias": (hidden,), "down_bias": (width,)}

    def step(block):
        """The block's result and the gradients of its input and parameters."""

        def function(x, g, up, down, *biases):
            params = {"up": up, "down": down}
            params |= dict(zip(("up_bias", "down_bias"), biases, strict=False))
            out, pull = jax.vjp(block, x, params)
            return out, pull(g)

        return function

    def layers(x, p):
        if gated:
            h = jax_tcgemm.gated_linear(x, p["up"], activation=activation)
        else:
            h = jax_tcgemm.linear(x, p["up"], p["up_bias"], activation=activation)
        return jax_tcgemm.linear(h, p["down"], p.get("down_bias"))

    def expression(product):
        def block(x, p):
            if gated:
                both = product(x, p["up"].reshape(width, 2 * hidden))
                return product(f(both[:, :hidden]) * both[:, hidden:], p["down"])
            h = f(product(x, p["up"]) + p["up_bias"])
            return product(h, p["down"]) + p["down_bias"]

        return block

    return _workload(
        suite,
        f"{label} {'gated ' * gated}{activation}".strip(),
        dtype,
        f"{tokens}×({width}→{hidden}→{width})",
        {"tokens": tokens, "width": width, "hidden": hidden},
        shapes,
        ours={
            "fused": step(functools.partial(jax_tcgemm.mlp, activation=activation)),
            "layers": step(layers),
        },
        peers={"xla": step(expression(jnp.matmul))},
        reference=step(expression(functools.partial(jnp.matmul, precision="highest"))),
        # The hidden layer, its gradient and what is made of them are rounded one after the other.
        tolerance=_tolerance(dtype, 6),
        flops=3 * 2 * tokens * width * hidden * (3 if gated else 2),
    )
