"""The demo: a network that reads handwritten digits, trained twice from the same start.

Once every matrix product, forward and backward, is `jax_tcgemm.matmul`, once `jnp.matmul`. The
data are the 1797 8x8 images that ship inside scikit-learn. Beside it the demo shows what
`jax_tcgemm.accelerate` makes of the network's training step in plain jnp, and of a transformer
layer's, with estimated times on a GPU.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.command import estimates, transformer
from jax_tcgemm.inspect.explain import Explanation
from jax_tcgemm.problem.call_options import CallOptions

LAYER_SIZES = (64, 256, 256, 10)
_BATCH_SIZE = 128
_NUM_TEST_IMAGES = 360
_LEARNING_RATE = 0.05
_MOMENTUM = 0.9
_SEED = 0

_MatMul = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images as rows of 64 numbers in [0, 1], and the digit each shows."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one of the two trainings."""

    test_accuracy: float
    final_loss: float
    step_us: float  # median wall-clock time of a training step


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """Both trainings, what the products of ours ran on, and what a GPU would run.

    `accelerated` is the network's training step in plain jnp under `accelerate`, and `transformer`
    that of a transformer layer, both for the GPU here or an assumed one. None where a debug switch
    names the implementation of every product.
    """

    ours: Outcome
    jnp: Outcome
    explanation: Explanation
    accelerated: Explanation | None
    transformer: Explanation | None


def load_digits() -> Digits:
    """Loads scikit-learn's handwritten digits, shuffled and split in a fixed way.

    Raises:
      ModuleNotFoundError: without scikit-learn, saying how to get it.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "demo: scikit-learn must be installed, because the digits are part of it; run"
            " pip install 'jax_tcgemm[demo]', or pip install '.[demo]' in a checkout"
        ) from error
    data = datasets.load_digits()
    order = np.random.default_rng(_SEED).permutation(len(data.target))
    images = (data.data[order] / 16).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    split = len(labels) - _NUM_TEST_IMAGES
    return Digits(images[:split], labels[:split], images[split:], labels[split:])


def init_params(key: jax.Array) -> list[dict[str, jax.Array]]:
    """He-initialized weights and zero biases of every layer."""
    keys = jax.random.split(key, len(LAYER_SIZES) - 1)
    return [
        {
            "weights": jax.random.normal(k, (num_in, num_out)) * jnp.sqrt(2 / num_in),
            "bias": jnp.zeros(num_out),
        }
        for k, num_in, num_out in zip(keys, LAYER_SIZES[:-1], LAYER_SIZES[1:], strict=True)
    ]


def logits(matmul: _MatMul, params, images: jax.Array) -> jax.Array:
    """The network: products, biases, ReLU between the layers."""
    x = images
    for i, layer in enumerate(params):
        x = matmul(x, layer["weights"]) + layer["bias"]
        if i < len(params) - 1:
            x = jax.nn.relu(x)
    return x


def loss(matmul: _MatMul, params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    log_probabilities = jax.nn.log_softmax(logits(matmul, params, images))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def make_train_step(matmul: _MatMul) -> Callable:
    """One step of gradient descent with momentum, as a function to be jitted."""

    def train_step(params, velocity, images, labels):
        value, gradients = jax.value_and_grad(functools.partial(loss, matmul))(
            params, images, labels
        )
        velocity = jax.tree.map(lambda v, g: _MOMENTUM * v + g, velocity, gradients)
        params = jax.tree.map(lambda p, v: p - _LEARNING_RATE * v, params, velocity)
        return params, velocity, value

    return train_step


def batches(digits: Digits, num_steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return random batches of images and labels, the same ones in each call."""
    rng = np.random.default_rng(_SEED)
    for _ in range(num_steps):
        rows = rng.choice(len(digits.train_labels), _BATCH_SIZE, replace=False)
        yield digits.train_images[rows], digits.train_labels[rows]


class _Training:
    """Training in progress: parameters, and the duration of each step."""

    def __init__(self, matmul: _MatMul):
        self._matmul = matmul
        self._step = jax.jit(make_train_step(matmul))
        self._params = init_params(jax.random.key(_SEED))
        self._velocity = jax.tree.map(jnp.zeros_like, self._params)
        self._seconds: list[float] = []
        self.loss = float("nan")

    def arguments(self, images, labels) -> tuple:
        return self._params, self._velocity, images, labels

    def step(self, images, labels) -> None:
        start = time.perf_counter()
        self._params, self._velocity, value = jax.block_until_ready(
            self._step(*self.arguments(images, labels))
        )
        self._seconds.append(time.perf_counter() - start)
        self.loss = float(value)

    def outcome(self, digits: Digits) -> Outcome:
        predict = jax.jit(functools.partial(logits, self._matmul))
        predicted = np.argmax(predict(self._params, digits.test_images), axis=1)
        accuracy = float(np.mean(predicted == digits.test_labels))
        # The first step compiles.
        return Outcome(accuracy, self.loss, float(np.median(self._seconds[1:])) * 1e6)


def run_demo(
    num_steps: int = 600,
    implementation: str | None = None,
    console: Console | None = None,
    picture: pathlib.Path | None = None,
) -> DemoResult:
    """Trains both networks step by step in turns and prints them side by side.

    Then prints the calls that `jax_tcgemm.accelerate` makes of the network in plain jnp and of a
    transformer layer, with estimated times.

    Args:
      num_steps: training steps, at least 2.
      implementation: forces one implementation for every product; None lets the library choose.
      console: where to print; the standard output by default.
      picture: a PNG to draw the transformer layer's estimated times to; None draws none.

    Raises:
      ModuleNotFoundError: without scikit-learn, or for a picture without matplotlib.
      ValueError: for an implementation that cannot run one of the products, or a picture that
        cannot be written.
    """
    if num_steps < 2:
        raise ValueError(
            f"demo: steps must be at least 2, got steps={num_steps}; the first one compiles"
        )
    console = console or Console()
    if picture is not None:
        estimates.check_picture(picture)
    digits = load_digits()
    matmul = functools.partial(jax_tcgemm.matmul, implementation=implementation)
    ours, theirs = _Training(matmul), _Training(jnp.matmul)

    first = next(batches(digits, 1))
    explanation = jax_tcgemm.explain(make_train_step(matmul), *ours.arguments(*first))
    accelerated = _on_gpu(make_train_step(jnp.matmul), *theirs.arguments(*first))
    of_transformer = _on_gpu(transformer.train_step, *transformer.arguments())
    _train(ours, theirs, digits, num_steps, console)
    outcomes = ours.outcome(digits), theirs.outcome(digits)
    result = DemoResult(*outcomes, explanation, accelerated, of_transformer)
    _print(result, num_steps, console)
    _print_estimates(result, console, picture)
    return result


def _on_gpu(step: Callable, *args) -> Explanation | None:
    """Explain an accelerated step on the GPU here, or on an assumed one; None if forced."""
    if selection.is_forced(CallOptions("demo")):
        return None
    # One device runs the step, however many there are.
    accelerated = jax_tcgemm.accelerate(step, losses=True)
    return jax_tcgemm.explain(accelerated, *args, platform="cuda")


def _train(ours: _Training, theirs: _Training, digits: Digits, num_steps: int, console: Console):
    """Trains both in turns, and shows how far they are."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[losses]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training both", total=num_steps, losses="")
        for images, labels in batches(digits, num_steps):
            ours.step(images, labels)
            theirs.step(images, labels)
            progress.update(task, advance=1, losses=f"loss {ours.loss:.4f} | {theirs.loss:.4f}")


def _print_estimates(result: DemoResult, console: Console, picture: pathlib.Path | None) -> None:
    """Prints the calls of both accelerated steps, and draws those of the transformer layer."""
    if result.accelerated is None or result.transformer is None:
        console.print("No estimated times: a debug switch names what runs every product.")
        return
    device = result.transformer.device
    on = f"on {device.name}" + (", assumed" if device.assumed else "")
    title = f"The same step in plain jnp under jax_tcgemm.accelerate: calls {on}"
    console.print(estimates.calls_table(title, result.accelerated))
    t = transformer
    title = (
        f"Training step of a transformer layer under jax_tcgemm.accelerate, {on}\n"
        f"bf16, {t.TOKENS} tokens, width {t.WIDTH}, {t.HEADS} heads, MLP {t.HIDDEN}, "
        f"vocabulary {t.VOCABULARY}; estimated, nothing is run"
    )
    console.print(estimates.bars(title, result.transformer, console))
    if picture is not None:
        estimates.draw(title, result.transformer, picture)
        console.print(f"wrote {picture}", soft_wrap=True, markup=False)


def _print(result: DemoResult, num_steps: int, console: Console) -> None:
    explanation = result.explanation
    ran = Table(title=f"Products of one training step, on {explanation.platform}")
    for heading in ("M×N×K, layout, types", "implementation", "why"):
        ran.add_column(heading)
    for call in explanation:
        ran.add_row(str(call.problem or "-"), f"{call.implementation}/{call.config}", call.why)
    console.print(ran)
    network = "→".join(map(str, LAYER_SIZES))
    table = Table(title=f"{network} network, {num_steps} steps of {_BATCH_SIZE} digits")
    table.add_column("")
    table.add_column("jax_tcgemm.matmul", justify="right")
    table.add_column("jnp.matmul", justify="right")
    for name, text in (
        ("test accuracy", lambda o: f"{o.test_accuracy:.2%}"),
        ("last training loss", lambda o: f"{o.final_loss:.5f}"),
        ("time of a step (median)", lambda o: f"{o.step_us:.0f} µs"),
    ):
        table.add_row(name, text(result.ours), text(result.jnp))
    console.print(table)
