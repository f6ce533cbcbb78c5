"""Trains a small language model on Python's own sources, every projection through jax_tcgemm.

    pip install 'jax_tcgemm[test,bench]'
    python examples/train_gpt.py --size toy --stock          # two minutes on two CPU cores
    python examples/train_gpt.py --size 100m --steps 2000    # a GPU
    python examples/train_gpt.py --size 100m --mesh data=2   # two, beside one

A decoder-only transformer in Flax NNX over bytes: `nnx.Linear(dot_general=jax_tcgemm.dot_general)`
where a layer is a product, `jax_tcgemm.linear` where a residual follows it, and `jax_tcgemm.mlp`
for the gated feed-forward blocks with their fused backward pass. `--stock` trains the same network
from the same start with stock Flax and jnp, in turns of twenty steps, `--accelerate` that stock
network, unchanged, under `jax_tcgemm.accelerate`, `--fused-loss` ours with its head inside of
`jax_tcgemm.linear_cross_entropy`, which keeps no logits, and `--fp8 RECIPE` ours with the products
of its blocks in 8 bits, by `jax_tcgemm.Fp8DotGeneral` and `Fp8Mlp`. `--optimizer muon` trains the
matrices of the blocks by Muon: stock networks by `optax.contrib.muon`, which is accelerated with
the rest of the step, and ours by `jax_tcgemm.scale_by_muon` in its place. Written to --out: the
losses and the time of every step as JSON, and the curves as a plot.

`--mesh` trains on several devices, beside one: `data=2` divides the batch, `model=2` the heads and
the hidden layer (tensor parallelism). The program is the same; only its arrays lie elsewhere, and
XLA adds the exchanges, which are printed.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import re
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import several_devices
import typer
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jax_tcgemm

NUM_TOKENS = 256  # bytes
# In a row of one network: step by step each would have the clocks that the others' power leaves it.
TURN = 20
_SEED = 0
# The dimension of a weight that the mesh axis "model" divides: heads, and units of hidden layers.
MODEL_DIMENSIONS = {"qkv": 1, "out": 0, "up": 2, "down": 0}


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the network and of a step."""

    width: int
    hidden: int
    layers: int
    heads: int
    context: int
    batch: int
    learning_rate: float


SIZES = {
    "test": Size(32, 96, 2, 2, 16, 4, 1e-2),
    "toy": Size(128, 384, 4, 4, 64, 8, 3e-3),
    "100m": Size(768, 2560, 12, 12, 1024, 16, 6e-4),
    "300m": Size(2048, 8192, 6, 16, 1024, 16, 3e-4),
}


# --- the network --------------------------------------------------------------------------------


class Products(NamedTuple):
    """What multiplies: an argument of nnx.Linear, a projection that adds, a feed-forward block.

    `ends` is an argument of nnx.Linear for the embedding and the head; None is as the others.
    """

    dot_general: Callable
    project: Callable
    feed_forward: Callable
    ends: Callable | None = None


def _ours_feed_forward(x, up, down, residual):
    params = {"up": up, "down": down}
    return jax_tcgemm.mlp(x, params, activation="silu", residual=residual)


def _stock_feed_forward(x, up, down, residual):
    gate, value = jnp.einsum("btk,kcj->cbtj", x, up)
    return residual + (jax.nn.silu(gate) * value) @ down


OURS = Products(
    dot_general=jax_tcgemm.dot_general,
    project=lambda x, w, residual: jax_tcgemm.linear(x, w, residual=residual),
    feed_forward=_ours_feed_forward,
)
STOCK = Products(
    dot_general=jax.lax.dot_general,
    project=lambda x, w, residual: residual + x @ w,
    feed_forward=_stock_feed_forward,
)


def in_8_bits(recipe: str) -> Products:
    """Those of `jax_tcgemm.Fp8DotGeneral` and `Fp8Mlp`; embedding and head stay as they are."""
    dot_general, mlp = jax_tcgemm.Fp8DotGeneral(recipe), jax_tcgemm.Fp8Mlp(recipe)

    def product(x, w):
        return dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))

    def feed_forward(x, up, down, residual):
        return mlp(x, {"up": up, "down": down}, activation="silu", residual=residual)

    return Products(
        dot_general=dot_general,
        project=lambda x, w, residual: residual + product(x, w),
        feed_forward=feed_forward,
        ends=jax_tcgemm.dot_general,
    )


def make_weight(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    """A weight that keeps the variance of what it multiplies."""
    return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[0] ** -0.5)


class Block(nnx.Module):
    """Attention and a gated feed-forward block, each added to its input."""

    def __init__(self, size: Size, products: Products, dtype, rngs: nnx.Rngs):
        self.size, self.products, self.dtype = size, products, dtype
        self.attention_norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(
            size.width,
            3 * size.width,
            use_bias=False,
            dtype=dtype,
            dot_general=products.dot_general,
            rngs=rngs,
        )
        self.out = make_weight(rngs, size.width, size.width)
        self.feed_forward_norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.up = make_weight(rngs, size.width, 2, size.hidden)
        self.down = make_weight(rngs, size.hidden, size.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """From (batch, context, width) to the same."""
        x = self.attend(x)
        up, down = self.cast(self.up), self.cast(self.down)
        return self.products.feed_forward(self.feed_forward_norm(x), up, down, x)

    def attend(self, x: jax.Array) -> jax.Array:
        """The first half."""
        qkv = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], self.size.heads, 3, -1)
        q, k, v = (qkv[:, :, :, i] for i in range(3))
        # XLA's unfused attention would be most of a step, whatever multiplies.
        fused = jax.default_backend() == "gpu" and q.dtype.itemsize == 2
        attended = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn" if fused else "xla"
        )
        return self.products.project(attended.reshape(x.shape), self.cast(self.out), x)

    def cast(self, weight: nnx.Param) -> jax.Array:
        """A weight in the dtype of the activations."""
        return weight[...].astype(self.dtype)


class Gpt(nnx.Module):
    """A decoder-only transformer over bytes."""

    def __init__(
        self, size: Size, products: Products, dtype, rngs: nnx.Rngs, block: type[Block] = Block
    ):
        linear = functools.partial(
            nnx.Linear,
            use_bias=False,
            dtype=dtype,
            dot_general=products.ends or products.dot_general,
            rngs=rngs,
        )
        # A product, whose gradient is one, too; that of a lookup adds rows to so few others that
        # they wait for each other, which was 40 % of a step.
        self.embedding = linear(NUM_TOKENS, size.width)
        self.positions = make_weight(rngs, size.context, size.width)
        self.blocks = nnx.List([block(size, products, dtype, rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.head = linear(size.width, NUM_TOKENS)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits (batch, context, 256) of the byte that follows each."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """What comes into the first block."""
        x = self.embedding(jax.nn.one_hot(tokens, NUM_TOKENS))
        return x + self.positions[...].astype(x.dtype)[: tokens.shape[1]]

    def logits(self, x: jax.Array) -> jax.Array:
        """What is made of what comes out of the last block."""
        return self.head(self.norm(x)).astype(jnp.float32)

    def loss(self, tokens: jax.Array, following: jax.Array) -> jax.Array:
        """The mean cross-entropy of the bytes that follow, without their logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        # The kernel has the features first; it is small.
        w = self.head.kernel[...].astype(x.dtype).T
        return jax_tcgemm.linear_cross_entropy(self.norm(x), w, following)


# --- the text -----------------------------------------------------------------------------------


def read_text(max_bytes: int) -> np.ndarray:
    """The sources of Python's standard library on this machine, one after the other, as bytes."""
    parts, total = [], 0
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if total >= max_bytes:
            break
        if {"site-packages", "test", "tests", "idlelib"} & set(path.parts):
            continue
        parts.append(path.read_bytes())
        total += len(parts[-1])
    return np.frombuffer(b"".join(parts)[:max_bytes], np.uint8)


def batches(text: np.ndarray, size: Size) -> Iterator[np.ndarray]:
    """Random pieces of text, each one byte longer than the context; the same for everyone."""
    rng = np.random.default_rng(_SEED)
    while True:
        starts = rng.integers(0, len(text) - size.context - 1, size.batch)
        yield np.stack([text[s : s + size.context + 1] for s in starts]).astype(np.int32)


# --- the optimizer ------------------------------------------------------------------------------


def dimension_numbers(params):
    """Which dimensions are a matrix for Muon: those of blocks; Adam trains the other arrays."""

    def of(path, leaf):
        names = re.findall(r"\w+", jax.tree_util.keystr(path))
        if "blocks" not in names or leaf.ndim < 2:
            return None
        # Gate and up of (width, 2, hidden) are two matrices.
        return optax.contrib.MuonDimensionNumbers(0, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(of, params)


def make_optimizer(
    name: str, schedule, dtype, stock: bool
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW or Muon, of which a stock one is Optax's."""
    if name == "adamw":
        return optax.adamw(schedule)
    if name != "muon":
        raise ValueError(f"train_gpt: optimizer must be adamw or muon, got optimizer={name}")
    if stock:
        return optax.contrib.muon(
            schedule,
            consistent_rms=0.2,
            weight_decay=1e-4,
            adam_weight_decay=1e-4,
            muon_weight_dimension_numbers=dimension_numbers,
        )

    def masked(params):
        """The dimension numbers of a tree of which only matrices are left."""
        return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(0, x.ndim - 1), params)

    def scaled(x, _):
        """An update whose root mean square is 0.2, as those of Adam."""
        return 0.2 * max(x.shape[0], x.shape[-1]) ** 0.5 * x

    muon = optax.chain(
        jax_tcgemm.scale_by_muon(dtype=dtype, weight_dimension_numbers=masked),
        optax.stateless_with_tree_map(scaled),
        optax.add_decayed_weights(1e-4),
        optax.scale_by_learning_rate(schedule),
    )
    adam = optax.adamw(schedule, weight_decay=1e-4, nesterov=True)
    return optax.partition(
        {"muon": muon, "adam": adam},
        lambda params: jax.tree.map(
            lambda x: "adam" if x is None else "muon",
            dimension_numbers(params),
            is_leaf=lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers),
        ),
    )


# --- training -----------------------------------------------------------------------------------


class Training:
    """One network on its way."""

    def __init__(
        self,
        name: str,
        products: Products,
        size: Size,
        dtype,
        steps: int,
        mesh: jax.sharding.Mesh | None = None,
        accelerated: bool = False,
        fused_loss: bool = False,
        optimizer: str = "adamw",
    ):
        self.name, self.mesh = name, mesh
        model = Gpt(size, products, dtype, nnx.Rngs(_SEED))
        graph, self.params = nnx.split(model)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, size.learning_rate, max(steps // 20, 1), steps, size.learning_rate / 10
        )
        rule = make_optimizer(optimizer, schedule, dtype, products is STOCK)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), rule)
        self.state = optimizer.init(self.params)
        out_shardings = None
        if mesh is not None:
            trees = self.params, self.state
            self.params, self.state = several_devices.place(trees, mesh, MODEL_DIMENSIONS)
            out_shardings = jax.tree.map(lambda x: x.sharding, (self.params, self.state))
            out_shardings = (*out_shardings, None)
        self.losses: list[float] = []
        self.seconds: list[float] = []

        def loss(params, tokens):
            if fused_loss:
                return nnx.merge(graph, params).loss(tokens[:, :-1], tokens[:, 1:])
            logits = nnx.merge(graph, params)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        def step(params, state, tokens):
            value, gradients = jax.value_and_grad(loss)(params, tokens)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        if accelerated:
            step = jax_tcgemm.accelerate(step)
        self.function = step
        self._step = jax.jit(step, donate_argnums=(0, 1), out_shardings=out_shardings)
        self.compiled: jax.stages.Compiled | None = None

    def step(self, tokens: np.ndarray) -> None:
        """Trains on one batch."""
        if self.mesh is not None:
            tokens = several_devices.place_batch(tokens, self.mesh)
        start = time.perf_counter()
        if self.compiled is None:
            self.compiled = self._step.lower(self.params, self.state, tokens).compile()
        self.params, self.state, loss = jax.block_until_ready(
            self.compiled(self.params, self.state, tokens)
        )
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    @property
    def step_ms(self) -> float:
        """Median time of a step, the first, which compiles, left out."""
        return statistics.median(self.seconds[1:] or self.seconds) * 1e3


def train(
    size: str = "toy",
    steps: int = 200,
    stock: bool = False,
    dtype: str | None = None,
    out: pathlib.Path = pathlib.Path("train_gpt"),
    console: Console | None = None,
    mesh: str | None = None,
    accelerate: bool = False,
    fused_loss: bool = False,
    fp8: str | None = None,
    optimizer: str = "adamw",
) -> dict:
    """Trains and writes what happened.

    Args:
      size: a name in SIZES.
      steps: training steps, at least 2.
      stock: train the network with stock Flax, too.
      dtype: dtype of the activations; None takes bfloat16 on a GPU and float32 elsewhere.
      out: folder for `record.json` and `loss.png`.
      console: where to print.
      mesh: several devices to train on, such as "data=2" or "model=2", beside one.
      accelerate: train the network with stock Flax under `jax_tcgemm.accelerate`, too.
      fused_loss: train ours with its head inside of the loss, too.
      fp8: a recipe of `jax_tcgemm.Fp8DotGeneral` to train the network with, too.
      optimizer: "adamw" or "muon", of all trainings.

    Returns:
      The record.
    """
    console, sizes = console or Console(), SIZES[size]
    dtype = jnp.dtype(dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32"))
    text = read_text(20_000_000 if sizes.width > 500 else 2_000_000)
    make = functools.partial(Training, optimizer=optimizer)
    trainings = [make("jax_tcgemm", OURS, sizes, dtype, steps)]
    if mesh is not None:
        devices = several_devices.make_mesh(mesh)
        trainings.append(make(f"jax_tcgemm, {mesh}", OURS, sizes, dtype, steps, devices))
    if stock:
        trainings.append(make("stock Flax", STOCK, sizes, dtype, steps))
    if fp8 is not None:
        trainings.append(make(f"8 bits, {fp8}", in_8_bits(fp8), sizes, dtype, steps))
    if accelerate:
        name = "stock Flax, accelerated"
        trainings.append(make(name, STOCK, sizes, dtype, steps, accelerated=True))
    if fused_loss:
        trainings.append(make("fused loss", OURS, sizes, dtype, steps, fused_loss=True))
    ours = trainings[0]
    num_params = sum(leaf.size for leaf in jax.tree.leaves(ours.params))
    device = jax.devices()[0].device_kind
    console.print(
        f"{num_params / 1e6:.1f} M parameters, {dtype}, {len(text) / 1e6:.1f} MB, {device}"
    )
    stream = batches(text, sizes)
    tokens = next(stream)
    explanation, *others = (
        jax_tcgemm.explain(t.function, t.params, t.state, tokens)
        for t in (ours, *(t for t in trainings if t.name.endswith("accelerated")))
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[losses]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, losses="")
        for begin in range(0, steps, TURN):
            turn = list(itertools.islice(stream, min(TURN, steps - begin)))
            for training in trainings:
                for tokens in turn:
                    training.step(tokens)
                    progress.update(task, advance=1 / len(trainings))
            losses = " | ".join(f"{t.name} {t.losses[-1]:.3f}" for t in trainings)
            progress.update(task, losses=losses)
    tokens_per_step = sizes.batch * sizes.context
    record = {
        "size": size,
        "sizes": dataclasses.asdict(sizes),
        "parameters": num_params,
        "dtype": dtype.name,
        "optimizer": optimizer,
        "device": device,
        "jax": jax.__version__,
        "products": [f"{c.problem}: {c.implementation}/{c.config}" for c in explanation],
        "accelerated": [
            without_folders(f"{c.implementation}/{c.config}: {c.why}") for x in others for c in x
        ],
        "trainings": {
            t.name: {
                "losses": t.losses,
                "step_ms": t.step_ms,
                "tokens_per_second": tokens_per_step / t.step_ms * 1e3,
                "seconds": t.seconds,
                "speed_up": ours.step_ms / t.step_ms,
                "collectives": several_devices.collectives(t.compiled),
            }
            for t in trainings
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    plot(trainings, out / "loss.png")
    _print(trainings, tokens_per_step, explanation, console)
    for name, training in record["trainings"].items():
        for collective, found in training["collectives"].items():
            megabytes = f"{found['megabytes']:.1f} MB"
            console.print(f"{name}: {found['count']} {collective} a step, {megabytes} on a device")
    console.print(f"wrote {out / 'record.json'} and {out / 'loss.png'}", soft_wrap=True)
    return record


def without_folders(text: str) -> str:
    """Paths of this example and of installed packages without the folders of this machine."""
    for folder in (pathlib.Path(__file__).resolve().parents[1], sysconfig.get_path("purelib")):
        text = text.replace(f"{folder}/", "")
    return text


def plot(trainings: list[Training], path: pathlib.Path) -> None:
    """Draws the losses of all trainings over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained", dpi=130)
    axis = figure.subplots()
    for training, style in zip(trainings, itertools.cycle(("-", "--", ":", "-.")), strict=False):
        label = f"{training.name}, {training.step_ms:.1f} ms a step"
        axis.plot(training.losses, style, label=label, linewidth=1.5)
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats a byte")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path)


def _print(trainings, tokens_per_step, explanation, console) -> None:
    ran: dict[str, int] = {}
    for call in explanation:
        name = f"{call.implementation}/{call.config}"
        ran[name] = ran.get(name, 0) + 1
    names = ", ".join(f"{name} ({count})" for name, count in ran.items())
    console.print(f"{len(explanation)} products a step, run by {names}")
    table = Table("", "first loss", "last loss", "ms a step", "tokens a second", "speed-up")
    for t in trainings:
        rate = tokens_per_step / t.step_ms * 1e3
        speed_up = trainings[0].step_ms / t.step_ms
        cells = f"{t.losses[0]:.4f}", f"{t.losses[-1]:.4f}", f"{t.step_ms:.1f}", f"{rate:.0f}"
        table.add_row(t.name, *cells, f"{speed_up:.2f}")
    console.print(table)


def main(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "toy",
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 200,
    stock: Annotated[bool, typer.Option("--stock", help="Train with stock Flax, too.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the activations.")] = None,
    out: Annotated[pathlib.Path, typer.Option(help="Folder for the record and the plot.")] = (
        pathlib.Path("train_gpt")
    ),
    mesh: Annotated[str | None, typer.Option(help="Devices: data=2, model=2 or both.")] = None,
    accelerate: Annotated[
        bool, typer.Option("--accelerate", help="Train with stock Flax, accelerated, too.")
    ] = False,
    fused_loss: Annotated[
        bool, typer.Option("--fused-loss", help="Train with the head inside of the loss, too.")
    ] = False,
    fp8: Annotated[
        str | None, typer.Option(help="Train in 8 bits, too: current or block128.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
) -> None:
    """Train a small language model on Python's own sources."""
    train(
        size,
        steps,
        stock,
        dtype,
        out,
        mesh=mesh,
        accelerate=accelerate,
        fused_loss=fused_loss,
        fp8=fp8,
        optimizer=optimizer,
    )


if __name__ == "__main__":
    typer.run(main)
