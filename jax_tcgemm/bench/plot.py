"""Charts of records: TFLOP/s against size, and ratios to the best peer.

Needs matplotlib (the extra ``bench``).
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence

from jax_tcgemm.bench.records import contender_name, contenders, grouped, record_tflops, shape

# Okabe and Ito's palette, told apart by readers of every colour vision; markers differ as well.
# One implementation looks the same in every chart.
_STYLES = {
    "auto": {"color": "#0072B2", "marker": "o"},
    "wgmma": {"color": "#D55E00", "marker": "s"},
    "mma_sync": {"color": "#CC79A7", "marker": "D"},
    "wmma_tiled": {"color": "#009E73", "marker": "^"},
    "wmma_naive": {"color": "#E69F00", "marker": "v"},
    "simt_tiled": {"color": "#56B4E9", "marker": "P"},
    "simt_batched": {"color": "#0072B2", "marker": "h"},
    "simt_naive": {"color": "#F0E442", "marker": "X"},
    "host": {"color": "#56B4E9", "marker": "P"},
    "xla": {"color": "#000000", "marker": "x", "linestyle": "--"},
    "cublaslt": {"color": "#7F7F7F", "marker": "+", "linestyle": "--"},
}
_PEER_LABELS = {"xla": "XLA", "cublaslt": "cuBLASLt"}
# More cases than this are drawn as one sorted curve, without a label each.
_MAX_LABELS = 64


def _style(name: str, index: int) -> dict:
    # Forced configs of one implementation share a chart, so each takes a style of its own.
    return _STYLES.get(name) or list(_STYLES.values())[index % 7]


def plot(records: Sequence[dict], path: pathlib.Path, digest: str = "") -> None:
    """Draws one panel for each suite and dtype of `records` as a PNG.

    Suites of squares become curves of TFLOP/s over the size; the others become dots of the ratio
    to the best peer, one row for each case, or of TFLOP/s where no peer was measured.

    Args:
      records: as :func:`records.read_records` returns them; not empty.
      path: the file to write.
      digest: kept in the file's metadata, to tell which records it shows.

    Raises:
      ValueError: without records.
      ModuleNotFoundError: without matplotlib, saying how to get it.
    """
    if not records:
        raise ValueError(
            "bench: a plot must show at least one record, got none; measure something first"
        )
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "bench: matplotlib must be installed to plot; run pip install 'jax_tcgemm[bench]', or"
            " pip install '.[bench]' in a checkout"
        ) from error
    panels = list(grouped(records).items())
    heights = [_panel_height(group) for _, group in panels]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained", dpi=130)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, ((suite, dtype), group) in zip(axes, panels, strict=True):
        if _is_squares(group):
            _draw_sizes(axis, group)
        else:
            _draw_cases(axis, group)
        device = group[0]["machine"]["device"]
        axis.set_title(f"{suite}, {dtype}, {device}", loc="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Records": digest, "Software": None})


def plot_sweep(records: Sequence[dict], path: pathlib.Path, digest: str = "") -> None:
    """Draws XLA's time over ours of random problems, a row of dots for each kind.

    Args:
      records: of a sweep; not empty.
      path: the file to write.
      digest: kept in the file's metadata, to tell which records it shows.
    """
    from matplotlib.figure import Figure

    by_kind: dict[str, list[float]] = {}
    for record in records:
        if "ratio" in record:
            by_kind.setdefault(record["sweep_kind"], []).append(record["ratio"])
    figure = Figure(figsize=(9, 1.6 + 0.26 * len(by_kind)), layout="constrained", dpi=130)
    axis = figure.subplots()
    for row, ratios in enumerate(by_kind.values()):
        axis.plot(ratios, [row] * len(ratios), "o", color="#0072B2", alpha=0.5, markersize=5)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        axis.plot([mean], [row], "|", color="#D55E00", markersize=14, markeredgewidth=2)
    axis.set_yticks(range(len(by_kind)), list(by_kind), fontsize=8)
    axis.set_ylim(len(by_kind) - 0.5, -0.5)
    axis.set_xscale("log", base=2)
    axis.axvline(1.0, color="#000000", linewidth=1)
    axis.set_xlabel(
        "XLA's time / ours by default (right of 1: ours is faster); bars: geometric mean"
    )
    axis.set_title(f"random problems, {records[0]['machine']['device']}", loc="left", fontsize=11)
    axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Records": digest, "Software": None})


def _is_squares(group: Sequence[dict]) -> bool:
    square = all(
        r["kind"] == "product" and r["batch"] == 1 and r["m"] == r["n"] == r["k"] for r in group
    )
    return square and len({r["m"] for r in group}) > 2


def _panel_height(group: Sequence[dict]) -> float:
    num_cases = len(_case_labels(group))
    return 5.0 if _is_squares(group) or num_cases > _MAX_LABELS else 1.6 + 0.24 * num_cases


def _draw_sizes(axis, group: Sequence[dict]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    # (contender, layout): {size: TFLOP/s}; a peer that was also measured as one of ours is drawn
    # once.
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for record in group:
        curve = curves.setdefault((contender_name(record), record["layout"]), {})
        curve[record["m"]] = record["tflops"]
    ours = {name for name, _ in curves}
    for record in group:
        for name in record["peers"].keys() - ours:
            curve = curves.setdefault((name, record["layout"]), {})
            curve[record["m"]] = record_tflops(record, name)
    drawn = {name for name, _ in curves}
    names = [*contenders(group), *(name for name in _PEER_LABELS if name in drawn - ours)]
    layouts = {layout for _, layout in curves}
    for (name, layout), points in sorted(curves.items(), key=lambda item: names.index(item[0][0])):
        style = _style(name, names.index(name))
        label = _PEER_LABELS.get(name, name)
        if len(layouts) > 1:
            label = f"{label}, {layout}"
            if layout != "NN":
                style = style | {"linestyle": ":"}
        axis.plot(*zip(*sorted(points.items()), strict=True), label=label, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({r["m"] for r in group}))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:.0f}"))
    axis.tick_params(axis="x", rotation=45)
    axis.set_xlabel("M = N = K")
    axis.set_ylabel("TFLOP/s, median")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)


def _case_label(record: dict) -> str:
    return f"{record['label']}  {shape(record)}".strip()


def _case_labels(group: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(map(_case_label, group)))


def _draw_cases(axis, group: Sequence[dict]) -> None:
    has_ratio = any(r["ratio"] is not None for r in group)
    key = "ratio" if has_ratio else "tflops"
    shown = [r for r in group if r[key] is not None]
    labels = _case_labels(group)
    if len(labels) > _MAX_LABELS:
        labels = _case_labels(sorted(shown, key=lambda r: r[key]))
    rows = {label: i for i, label in enumerate(labels)}
    for i, name in enumerate(contenders(shown)):
        mine = [r for r in shown if contender_name(r) == name]
        style = _style(name, i) | {"linestyle": ""}
        values = [r[key] for r in mine]
        label = name
        if has_ratio:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            label = f"{name}, geomean {mean:.3f}"
            axis.axvline(mean, color=style["color"], linestyle=":", linewidth=1.5)
        axis.plot(values, [rows[_case_label(r)] for r in mine], label=label, **style)
    if len(rows) > _MAX_LABELS:
        axis.set_yticks([])
        axis.set_ylabel(f"{len(rows)} cases, sorted")
    else:
        axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    if has_ratio:
        axis.axvline(1.0, color="#000000", linewidth=1)
        axis.set_xlabel("best peer's time / ours (right of 1: ours is faster)")
    else:
        axis.set_xlabel("TFLOP/s, median")
        axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)
