"""The README's chart: XLA's time over ours, one bar for each kind of work.

Each bar is the geometric mean of the cases of one suite on one GPU, which its label names.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from jax_tcgemm.bench import records as rec


@dataclasses.dataclass(frozen=True)
class Work:
    """A kind of work and the records that measure it.

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


WORK = (
    Work("Rows that are not 16-byte aligned", "unaligned", "bf16", "auto"),
    Work("Experts: ragged_dot", "moe", "bf16", "ragged_dot"),
    Work("Experts: gated_ragged_linear", "moe", "bf16", "gated_ragged_linear"),
    Work("Layers: bias and activation fused", "fused", "bf16", "fused"),
    Work("Any JAX function as epilogue", "functions", "bf16", "auto"),
    Work("float8 with block scales", "scaled", "f8", "scaled"),
    Work("Weights of 4 and 8 bits, beside bf16", "packed", "bf16", "auto", "plain"),
    Work("Loss and gradients without logits", "losses", "bf16", "fused", "logits"),
    Work("float32 by BF16_BF16_F32_X3", "precise", "f32_x3", "auto"),
    Work("float32 by BF16_BF16_F32_X6", "precise", "f32_x6", "auto"),
    Work("einsum of any rank", "einsum", "bf16", "auto"),
    Work("An array by its own transpose", "symmetric", "bf16", "gram"),
    Work("Newton-Schulz iterations of Muon", "symmetric", "bf16", "newton_schulz"),
    Work("Large dense products of LLMs", "llama", "bf16", "auto"),
)


def bars(records: Sequence[dict]) -> list[tuple[str, float, dict]]:
    """Return the title, the ratio and one record of each bar that there are records for."""
    found = []
    for work in WORK:
        own = [
            record
            for record in records
            if (record["suite"], record["dtype"]) == (work.suite, work.dtype)
            and rec.contender_name(record) == work.contender
            and work.peer in record["peers"]
        ]
        ratios = [record["peers"][work.peer]["us"]["p50"] / record["us"]["p50"] for record in own]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            device = own[0]["machine"]["device"].removeprefix("NVIDIA ").split()[0]
            found.append((f"{work.title} ({len(ratios)} cases, {device})", mean, own[0]))
    return found


def shown(records: Sequence[dict]) -> list[dict]:
    """Return the records that the chart shows."""
    kinds = {(work.suite, work.dtype) for work in WORK}
    return [record for record in records if (record["suite"], record["dtype"]) in kinds]


def plot_highlights(records: Sequence[dict], path: pathlib.Path, digest: str = "") -> None:
    """Draw the chart.

    Args:
      records: of products and workloads.
      path: the file to write.
      digest: kept in the file's metadata, to tell which records it shows.
    """
    from matplotlib.figure import Figure

    found = bars(records)
    figure = Figure(figsize=(9, 1.0 + 0.32 * len(found)), layout="constrained", dpi=130)
    axis = figure.subplots()
    ratios = [ratio for _, ratio, _ in found]
    axis.barh(range(len(found)), [ratio - 1 for ratio in ratios], left=1, color="#0072B2")
    for row, ratio in enumerate(ratios):
        axis.text(max(ratio, 1) * 1.03, row, f"{ratio:.2f} ×", va="center", fontsize=9)
    axis.set_yticks(range(len(found)), [title for title, _, _ in found], fontsize=9)
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
