"""The README's chart: XLA's time over ours, one bar for each kind of work.

Each bar is the geometric mean of the cases of one kind on one GPU, which its label names.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import pathlib
from collections.abc import Sequence

from jax_tcgemm.bench import decode
from jax_tcgemm.bench import records as rec


@dataclasses.dataclass(frozen=True)
class Suite:
    """The cases of one suite.

    Attributes:
      title: what the bar is called.
      suite: the suite of its records.
      dtype: their dtype.
      contender: what of ours was measured.
      peer: what JAX users run instead.
    """

    title: str
    suite: str
    dtype: str
    contender: str
    peer: str = "xla"

    def ratios(self, records: Sequence[dict]) -> list[tuple[float, dict]]:
        """Return the peer's time over ours for each record of this kind, and the record."""
        return [
            (record["peers"][self.peer]["us"]["p50"] / record["us"]["p50"], record)
            for record in records
            if record["kind"] in ("product", "workload")
            and (record["suite"], record["dtype"]) == (self.suite, self.dtype)
            and rec.contender_name(record) == self.contender
            and self.peer in record["peers"]
        ]


@dataclasses.dataclass(frozen=True)
class Training:
    """Training steps of `examples/train_gpt.py`.

    Attributes:
      title: what the bar is called.
      name: name of the record.
      ours: the training that uses this library.
      peer: the training that JAX users run instead.
    """

    title: str
    name: str
    ours: str
    peer: str = "stock Flax"

    def ratios(self, records: Sequence[dict]) -> list[tuple[float, dict]]:
        """Return the peer's time over ours for each record of this kind, and the record."""
        found = []
        for record in records:
            if (record["kind"], record.get("name")) == ("training", self.name):
                ours, peer = (record["trainings"][key]["step_ms"] for key in (self.ours, self.peer))
                found.append((peer / ours, record))
        return found


@dataclasses.dataclass(frozen=True)
class Parallel:
    """A tensor-parallel MLP over several GPUs.

    Attributes:
      title: what the bar is called.
      devices: the number of GPUs.
    """

    title: str
    devices: int

    def ratios(self, records: Sequence[dict]) -> list[tuple[float, dict]]:
        """Return XLA's time over ours for the newest record of this kind, and the record."""
        own = [r for r in records if r["kind"] == "parallel" and r["devices"] == self.devices]
        if not own:
            return []
        record = max(own, key=lambda record: record["time"])
        times = {name: x["us"]["p50"] for name, x in record["contenders"].items() if "us" in x}
        return [(times["xla"] / times["sharded"], record)]


@dataclasses.dataclass(frozen=True)
class Decode:
    """Decode steps of a tensor-parallel MLP over several GPUs.

    Attributes:
      title: what the bar is called.
      devices: the number of GPUs.
      most_rows: the largest number of rows.
    """

    title: str
    devices: int
    most_rows: int

    def ratios(self, records: Sequence[dict]) -> list[tuple[float, dict]]:
        """Return XLA's time over ours for the newest record of each number of rows."""
        newest = rec.newest(records, "decode", operator.itemgetter("devices", "rows"))
        return [
            (us["psum"] / us["all_reduce"], record)
            for (devices, rows), record in newest.items()
            if devices == self.devices and rows <= self.most_rows and (us := decode.times(record))
        ]


Work = Suite | Training | Parallel | Decode

WORK = (
    Suite("Rows that are not 16-byte aligned", "unaligned", "bf16", "auto"),
    Suite("Experts: ragged_dot", "moe", "bf16", "ragged_dot"),
    Suite("Experts: gated_ragged_linear", "moe", "bf16", "gated_ragged_linear"),
    Suite("Layers: bias and activation fused", "fused", "bf16", "fused"),
    Suite("Any JAX function as epilogue", "functions", "bf16", "auto"),
    Suite("float8 with block scales", "scaled", "f8", "scaled"),
    Suite("Block formats: jax.nn.scaled_matmul", "block_formats", "f8", "scaled", "nn"),
    Suite("Weights of 4 and 8 bits (peer: our bf16)", "packed", "bf16", "auto", "plain"),
    Suite("Loss and gradients without logits", "losses", "bf16", "fused", "logits"),
    Suite("float32 by BF16_BF16_F32_X3", "precise", "f32_x3", "auto"),
    Suite("float32 by BF16_BF16_F32_X6", "precise", "f32_x6", "auto"),
    Suite("einsum of any rank", "einsum", "bf16", "auto"),
    Suite("An array by its own transpose", "symmetric", "bf16", "gram"),
    Suite("Newton-Schulz iterations of Muon", "symmetric", "bf16", "newton_schulz"),
    Training(
        "GPT training step of stock Flax, accelerated",
        "h100-train_gpt-accelerate",
        "stock Flax, accelerated",
    ),
    Training("GPT training step by the layers", "h100-train_gpt-accelerate", "jax_tcgemm"),
    Training("GPT training step with Muon", "h200-train_gpt-muon", "jax_tcgemm"),
    Suite("Large dense products of LLMs", "llama", "bf16", "auto"),
    Decode("Decode step of an MLP sharded over 2 GPUs", 2, 64),
    Parallel("MLP sharded over 4 GPUs", 4),
)


def bars(records: Sequence[dict]) -> list[tuple[str, float]]:
    """Return the title and the ratio of each bar that there are records for."""
    found = []
    for work, own in _measured(records):
        mean = math.exp(sum(math.log(ratio) for ratio, _ in own) / len(own))
        device = own[0][1]["machine"]["device"].removeprefix("NVIDIA ").split()[0]
        cases = f"{len(own)} {'case' if len(own) == 1 else 'cases'}"
        found.append((f"{work.title} ({cases}, {device})", mean))
    return found


def shown(records: Sequence[dict]) -> list[dict]:
    """Return the records that the chart shows."""
    return [record for _, own in _measured(records) for _, record in own]


def _measured(records: Sequence[dict]) -> list[tuple[Work, list[tuple[float, dict]]]]:
    """Return each kind of work that there are records for, with its newest ratios and records."""
    others = [r for r in records if r["kind"] not in ("product", "workload")]
    newest = [*rec.products(records), *rec.workloads(records), *others]
    found = ((work, work.ratios(newest)) for work in WORK)
    return [(work, own) for work, own in found if own]


def plot_highlights(records: Sequence[dict], path: pathlib.Path, digest: str = "") -> None:
    """Draw the chart.

    Args:
      records: of any kind.
      path: the file to write.
      digest: kept in the file's metadata, to tell which records it shows.
    """
    from matplotlib.figure import Figure

    found = bars(records)
    figure = Figure(figsize=(9, 1.0 + 0.32 * len(found)), layout="constrained", dpi=130)
    axis = figure.subplots()
    ratios = [ratio for _, ratio in found]
    axis.barh(range(len(found)), [ratio - 1 for ratio in ratios], left=1, color="#0072B2")
    for row, ratio in enumerate(ratios):
        axis.text(max(ratio, 1) * 1.03, row, f"{ratio:.2f} ×", va="center", fontsize=9)
    axis.set_yticks(range(len(found)), [title for title, _ in found], fontsize=9)
    axis.set_ylim(len(found) - 0.5, -0.5)
    axis.set_xscale("log", base=2)
    axis.set_xlim(min(0.9, *ratios), max(ratios) * 1.6)
    ticks = [x for x in (1, 2, 4, 8, 16, 32) if x < max(ratios) * 1.6]
    axis.set_xticks(ticks, [f"{x} ×" for x in ticks])
    axis.axvline(1.0, color="#000000", linewidth=1)
    axis.set_xlabel("time of XLA's program / ours by default, geometric mean")
    axis.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Records": digest, "Software": None})
