"""Trains a small mixture-of-experts language model on Python's own sources.

    pip install 'jax_tcgemm[test,bench]'
    python examples/train_moe.py                     # two minutes on two CPU cores
    python examples/train_moe.py --size 100m         # a GPU

The network of train_gpt.py with the feed-forward blocks replaced by experts: a router sends each
token to the best two, `jax_tcgemm.gated_ragged_linear` and `jax_tcgemm.ragged_dot` multiply every
expert's tokens by its own matrices, with no capacity, no padding and no dropped token. Written to
--out: the losses and how the tokens spread over the experts as JSON, and both as a plot.
"""

import json
import pathlib
import statistics
import time
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from jax import lax
from rich.console import Console
from rich.progress import track
from train_gpt import OURS, SIZES, Block, Gpt, Products, Size, batches, make_weight, read_text

import jax_tcgemm

NUM_EXPERTS = 8
EXPERTS_PER_TOKEN = 2
BALANCE_WEIGHT = 1e-2
_SEED = 0


class MoeBlock(Block):
    """Attention, then experts of half the width of the dense block's hidden layer each."""

    def __init__(self, size: Size, products: Products, dtype, rngs: nnx.Rngs):
        super().__init__(size, products, dtype, rngs)
        hidden = size.hidden // 2

        def experts(*shape):
            values = jax.random.normal(rngs.params(), (NUM_EXPERTS, *shape))
            return nnx.Param(values * shape[0] ** -0.5)

        self.router = make_weight(rngs, size.width, NUM_EXPERTS)
        self.up = experts(size.width, 2, hidden)
        self.down = experts(hidden, size.width)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The block's output, the loss that spreads tokens evenly, and each expert's share."""
        x = self.attend(x)
        tokens = self.feed_forward_norm(x).reshape(-1, x.shape[-1])
        scores = jax.nn.softmax(
            jax_tcgemm.matmul(tokens.astype(jnp.float32), self.router[...], precision="highest")
        )
        weights, experts = lax.top_k(scores, EXPERTS_PER_TOKEN)
        weights /= jnp.sum(weights, -1, keepdims=True)

        # One row for each pair of a token and one of its experts, sorted by expert. They are read
        # through their indices, so that no copy of the tokens in this order is made.
        pairs = experts.ravel()
        order = jnp.argsort(pairs, stable=True)
        sizes = jnp.bincount(pairs, length=NUM_EXPERTS)
        hidden = jax_tcgemm.gated_ragged_linear(
            tokens,
            self.cast(self.up),
            sizes,
            activation="silu",
            gather_indices=order // EXPERTS_PER_TOKEN,
        )
        rows = jax_tcgemm.ragged_dot(hidden, self.cast(self.down), sizes)

        # Where the rows of each token are, and their weighted sum.
        where = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
        out = jax_tcgemm.combine_rows(
            rows, where.reshape(weights.shape), weights, unique_indices=True
        )
        share = sizes / len(pairs)
        balance = NUM_EXPERTS * jnp.sum(lax.stop_gradient(share) * jnp.mean(scores, 0))
        return x + out.reshape(x.shape), balance, share


class MoeGpt(Gpt):
    """A decoder-only transformer over bytes whose feed-forward blocks are mixtures of experts."""

    def __init__(self, size: Size, dtype, rngs: nnx.Rngs):
        super().__init__(size, OURS, dtype, rngs, MoeBlock)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logits (batch, context, 256), the mean balance loss, and the shares (layers, experts)."""
        x = self.embed(tokens)
        balances, shares = [], []
        for block in self.blocks:
            x, balance, share = block(x)
            balances.append(balance)
            shares.append(share)
        return self.logits(x), jnp.mean(jnp.stack(balances)), jnp.stack(shares)


def train(
    size: str = "toy",
    steps: int = 200,
    dtype: str | None = None,
    out: pathlib.Path = pathlib.Path("train_moe"),
    console: Console | None = None,
) -> dict:
    """Trains and writes what happened.

    Args:
      size: a name in train_gpt.SIZES.
      steps: training steps, at least 2.
      dtype: dtype of the activations; None takes bfloat16 on a GPU and float32 elsewhere.
      out: folder for `record.json` and `training.png`.
      console: where to print.

    Returns:
      The record.
    """
    console, sizes = console or Console(), SIZES[size]
    dtype = jnp.dtype(dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32"))
    graph, params = nnx.split(MoeGpt(sizes, dtype, nnx.Rngs(_SEED)))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(sizes.learning_rate, steps, 0.1)),
    )
    state = optimizer.init(params)

    def loss(params, tokens):
        logits, balance, shares = nnx.merge(graph, params)(tokens[:, :-1])
        error = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return error + BALANCE_WEIGHT * balance, (error, shares)

    def step(params, state, tokens):
        gradients, aux = jax.grad(loss, has_aux=True)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, *aux

    text = read_text(20_000_000 if size == "100m" else 2_000_000)
    stream = batches(text, sizes)
    explanation = jax_tcgemm.explain(step, params, state, next(stream))
    run = jax.jit(step, donate_argnums=(0, 1))
    losses, shares, seconds = [], [], []
    for _ in track(range(steps), "training", console=console):
        start = time.perf_counter()
        params, state, error, share = jax.block_until_ready(run(params, state, next(stream)))
        seconds.append(time.perf_counter() - start)
        losses.append(float(error))
        shares.append(np.asarray(share).tolist())
    step_ms = statistics.median(seconds[1:]) * 1e3
    record = {
        "size": size,
        "dtype": dtype.name,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "products": [f"{c.problem}: {c.implementation}/{c.config}" for c in explanation],
        "losses": losses,
        "shares": shares,
        "step_ms": step_ms,
        "tokens_per_second": sizes.batch * sizes.context / step_ms * 1e3,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    plot(losses, np.array(shares), out / "training.png")
    busiest = np.array(shares[-1]).max() * NUM_EXPERTS
    console.print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {step_ms:.1f} ms a step; the busiest expert "
        f"has {busiest:.2f} times its even share; wrote {out / 'training.png'}",
        soft_wrap=True,
    )
    return record


def plot(losses: list[float], shares: np.ndarray, path: pathlib.Path) -> None:
    """Draws the loss, and each expert's share of the tokens, averaged over the layers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained", dpi=130)
    left, right = figure.subplots(1, 2)
    left.plot(losses)
    left.set(xlabel="step", ylabel="loss, nats a byte")
    right.plot(shares.mean(1), linewidth=1)
    right.axhline(1 / NUM_EXPERTS, color="black", linestyle=":", label="even")
    right.set(xlabel="step", ylabel="share of the tokens of each expert", ylim=(0, None))
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path)


def main(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "toy",
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 200,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the activations.")] = None,
    out: Annotated[pathlib.Path, typer.Option(help="Folder for the record and the plot.")] = (
        pathlib.Path("train_moe")
    ),
) -> None:
    """Train a small mixture-of-experts language model on Python's own sources."""
    train(size, steps, dtype, out)


if __name__ == "__main__":
    typer.run(main)
