"""Small models as programs of plain JAX: one step each, from a carry to the next.

What a product costs inside such a program is not what it costs alone: XLA may inline it in the loop
around it, fuse what follows into it, or keep its operands converted. See programs.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Model:
    """One step of a small model, repeated from its carry.

    Attributes:
      name: what it is, with its sizes.
      step: from a carry to the next, arrays of the same shapes and dtypes.
      carry: the first carry.
    """

    name: str
    step: Callable
    carry: tuple


def _normal(*shape, scale=None, seed=0, dtype=jnp.float32):
    """Standard normal numbers, by default divided by the root of the rows."""
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    scale = shape[-2] ** -0.5 if scale is None and len(shape) > 1 else (scale or 1.0)
    return jnp.asarray(scale * x, dtype)


def _descent(loss, rate=1e-3):
    """One step of gradient descent of the first entry of the carry; the others stay."""

    def step(params, *data):
        grads = jax.grad(loss)(params, *data)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), *data

    return step


def _layers(*widths, seed=0):
    return [
        (_normal(m, n, seed=seed + i), jnp.zeros(n))
        for i, (m, n) in enumerate(itertools.pairwise(widths))
    ]


def _net(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def _squared_error(net):
    return lambda params, x, y: jnp.mean((net(params, x) - y) ** 2)


def _matvec(width):
    def step(w, h):
        return w, jnp.tanh(w @ h)

    return Model(f"tanh(w @ h), width {width}", step, (_normal(width, width), jnp.ones(width)))


def _rnn():
    def step(params, xs):
        def cell(h, x):
            h = jnp.tanh(x @ params[0] + h @ params[1])
            return h, h

        return params, lax.scan(cell, jnp.zeros((16, 64)), xs)[1]

    return Model(
        "RNN, scan of 16×64",
        step,
        ((_normal(64, 64), _normal(64, 64, seed=1)), _normal(20, 16, 64)),
    )


def _gru():
    def loss(params, xs):
        wx, wh = params

        def cell(h, x):
            z, r, n = jnp.split(x @ wx, 3, axis=-1)
            uz, ur, un = jnp.split(h @ wh, 3, axis=-1)
            z, r = jax.nn.sigmoid(z + uz), jax.nn.sigmoid(r + ur)
            return z * h + (1 - z) * jnp.tanh(n + r * un), None

        return jnp.mean(lax.scan(cell, jnp.zeros((8, 32)), xs)[0] ** 2)

    carry = ((_normal(16, 96), _normal(32, 96)), _normal(12, 8, 16))
    return Model("GRU, training, 12 steps of 8×32", _descent(loss), carry)


def _mlp():
    carry = (_layers(32, 64, 64, 10), _normal(32, 32), _normal(32, 10))
    return Model("MLP, training, batch 32", _descent(_squared_error(_net)), carry)


def _mlp_forward():
    params = _layers(16, 32, 32, 16)
    return Model("MLP, one row", lambda p, x: (p, _net(p, x)), (params, _normal(1, 16)))


def _hessian():
    def step(w, x):
        hessian = jax.hessian(lambda x: jnp.sum(jnp.tanh(w @ x) ** 2))(x)
        return w, x - 1e-3 * jnp.diagonal(hessian)

    return Model("hessian of a layer, width 64", step, (_normal(64, 64), _normal(64)))


def _jacobian():
    def step(params, x):
        forward, reverse = (f(functools.partial(_net, params))(x) for f in (jax.jacfwd, jax.jacrev))
        return params, x + 1e-3 * (forward.sum(0) - reverse.sum(1))

    return Model("jacobians of a net, 16 → 32 → 16", step, (_layers(16, 32, 16), _normal(16)))


def _attention(params, x, mask=None):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in params[:3])
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores), v)
    return jnp.einsum("bqhe,hed->bqd", mixed, params[3])


def _attention_params(model=32, heads=4):
    split = [_normal(model, heads, model // heads, scale=0.1, seed=i) for i in range(3)]
    return (*split, _normal(heads, model // heads, model, scale=0.1, seed=3))


def _attention_block():
    carry = (_attention_params(), _normal(2, 32, 32))
    return Model("attention, 2×32×32", lambda p, x: (p, x + _attention(p, x)), carry)


def _transformer():
    def loss(params, x):
        attention, (up, down) = params
        x = x + _attention(attention, x, jnp.tri(16, dtype=bool))
        return jnp.mean((x + jax.nn.gelu(x @ up) @ down) ** 2)

    params = (_attention_params(), (_normal(32, 128), _normal(128, 32)))
    return Model(
        "transformer block, training, 4×16×32", _descent(loss), (params, _normal(4, 16, 32))
    )


def _decode():
    def step(params, keys, values, x, position):
        wq, wk, wv, wo = params
        q, k, v = (x @ w for w in (wq, wk, wv))
        keys = lax.dynamic_update_slice(keys, k[None], (position, 0))
        values = lax.dynamic_update_slice(values, v[None], (position, 0))
        scores = jnp.where(jnp.arange(128) <= position, keys @ q / 8, -1e9)
        x = jnp.tanh(x + (jax.nn.softmax(scores) @ values) @ wo)
        return params, keys, values, x, (position + 1) % 128

    params = tuple(_normal(64, 64, seed=i) for i in range(4))
    carry = (params, jnp.zeros((128, 64)), jnp.zeros((128, 64)), _normal(64), jnp.int32(0))
    return Model("decode step, 128 positions of 64", step, carry)


def _kalman():
    def step(f, h, state, covariance):
        state, covariance = f @ state, f @ covariance @ f.T + 0.01 * jnp.eye(6)
        s = h @ covariance @ h.T + 0.1 * jnp.eye(3)
        gain = jnp.linalg.solve(s, h @ covariance).T
        state = state + gain @ (jnp.ones(3) - h @ state)
        return f, h, state, (jnp.eye(6) - gain @ h) @ covariance

    carry = (0.9 * jnp.eye(6), _normal(3, 6), jnp.zeros(6), jnp.eye(6))
    return Model("Kalman filter, 6 states", step, carry)


def _newton():
    def step(a, x):
        def loss(x):
            return jnp.sum(jnp.logaddexp(0.0, a @ x)) + jnp.sum(x**2)

        return a, x - jnp.linalg.solve(jax.hessian(loss)(x), jax.grad(loss)(x))

    return Model("Newton's method, logistic loss, 50×8", step, (_normal(50, 8), jnp.zeros(8)))


def _power_iteration():
    def step(a, x):
        y = a @ x
        return a, y / jnp.linalg.norm(y)

    a = _normal(256, 256)
    return Model("power iteration, 256", step, (a + a.T, jnp.ones(256)))


def _chain(dtype, size):
    def step(w, x):
        for _ in range(3):
            x = x @ w
        return w, x

    carry = (_normal(size, size, dtype=dtype), _normal(size, size, dtype=dtype))
    return Model(f"chain of {jnp.dtype(dtype)} products, {size}", step, carry)


def _small_batches():
    def step(a, x):
        return a, jnp.tanh(jnp.matmul(a, x))

    return Model("64 products of 8×8", step, (_normal(64, 8, 8), _normal(64, 8, 8, seed=1)))


def _einsums():
    def step(core, x):
        y = jnp.einsum("aib,bjc,ckd,ijk->ad", core, core, core, x)
        return core, jnp.tanh(x + jnp.einsum("ad,aid,jk->ijk", y, core, x[0]))

    return Model("einsums of a tensor train, 8", step, (_normal(8, 8, 8), _normal(8, 8, 8, seed=1)))


def _ensemble():
    def step(params, x):
        return params, jax.vmap(_net)(params, x)

    members = [_layers(8, 16, 8, seed=i) for i in range(16)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    return Model("vmap of 16 nets", step, (params, _normal(16, 4, 8)))


def _neural_ode():
    def loss(params, x):
        def rk4(x, _):
            k1 = _net(params, x)
            k2 = _net(params, x + 0.05 * k1)
            k3 = _net(params, x + 0.05 * k2)
            k4 = _net(params, x + 0.1 * k3)
            return x + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        return jnp.mean(lax.scan(rk4, x, None, length=8)[0] ** 2)

    return Model("neural ODE, training", _descent(loss), (_layers(4, 32, 4), _normal(16, 4)))


def _pinn():
    def loss(params, points):
        def u(x):
            return _net(params, x)[0]

        def residual(x):
            return jnp.trace(jax.hessian(u)(x)) + jnp.sin(x[0]) * jnp.sin(x[1])

        return jnp.mean(jax.vmap(residual)(points) ** 2)

    return Model(
        "PINN, training, 64 points", _descent(loss), (_layers(2, 24, 24, 1), _normal(64, 2))
    )


def _vae():
    def loss(params, x, noise):
        encoder, decoder = params
        mean, log_scale = jnp.split(_net(encoder, x), 2, axis=-1)
        found = _net(decoder, mean + jnp.exp(log_scale) * noise)
        divergence = jnp.mean(mean**2 + jnp.exp(2 * log_scale) - 2 * log_scale)
        return jnp.mean((found - x) ** 2) + divergence

    params = (_layers(64, 48, 16), _layers(8, 48, 64))
    return Model(
        "VAE, training, batch 32", _descent(loss), (params, _normal(32, 64), _normal(32, 8))
    )


def _regression():
    carry = (_normal(32), _normal(200, 32), _normal(200))
    return Model(
        "linear regression, 200×32",
        _descent(_squared_error(lambda w, x: x @ w)),
        carry,
    )


def _gaussian_process():
    def loss(log_scale, x, y):
        square = jnp.sum(x**2, 1)
        distances = square[:, None] + square - 2 * x @ x.T
        kernel = jnp.exp(-distances * jnp.exp(log_scale)) + 0.1 * jnp.eye(48)
        chol = jnp.linalg.cholesky(kernel)
        alpha = jax.scipy.linalg.cho_solve((chol, True), y)
        return y @ alpha / 2 + jnp.sum(jnp.log(jnp.diagonal(chol)))

    return Model(
        "Gaussian process, 48 points", _descent(loss), (jnp.zeros(()), _normal(48, 3), _normal(48))
    )


def _graph():
    def net(params, adjacency, x):
        for w, b in params:
            x = jax.nn.relu(adjacency @ (x @ w) + b)
        return x

    def loss(params, adjacency, x):
        return jnp.mean(net(params, adjacency, x) ** 2)

    adjacency = jnp.asarray(np.random.default_rng(0).random((64, 64)) < 0.1, jnp.float32) / 6
    carry = (_layers(16, 32, 16), adjacency, _normal(64, 16))
    return Model("graph network, training, 64 nodes", _descent(loss), carry)


def _experts():
    def step(router, experts, x):
        choice = jnp.argmax(x @ router, -1)
        order = jnp.argsort(choice)
        sizes = jnp.bincount(choice, length=4)
        y = lax.ragged_dot(x[order], experts, sizes.astype(jnp.int32))
        return router, experts, jnp.tanh(jnp.zeros_like(x).at[order].set(y))

    carry = (_normal(32, 4), _normal(4, 32, 32), _normal(64, 32))
    return Model("mixture of 4 experts, 64×32", step, carry)


def models() -> list[Model]:
    """All of them, their arrays made anew."""
    return [
        *map(_matvec, (2, 8, 32)),
        *(_mlp_forward(), _mlp(), _rnn(), _gru(), _hessian(), _jacobian()),
        *(_attention_block(), _transformer(), _decode(), _experts(), _graph(), _vae()),
        *(_kalman(), _newton(), _power_iteration(), _small_batches(), _einsums(), _ensemble()),
        *(_neural_ode(), _pinn(), _regression(), _gaussian_process(), _chain(jnp.bfloat16, 512)),
    ]
