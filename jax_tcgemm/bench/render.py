"""Renders the committed records into the documentation: charts, and tables between markers."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import operator
import pathlib
import re
from collections.abc import Sequence

from jax_tcgemm.bench import decode, highlights, parallel, programs, sweep
from jax_tcgemm.bench import records as rec
from jax_tcgemm.bench.suites import Case, suite_names

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
_RESULTS = pathlib.Path("benchmarks/results")
_CHARTS = pathlib.Path("benchmarks/charts")
_PEERS = {"xla": "XLA", "cublaslt": "cuBLASLt"}
_PROGRAMS = {
    "models": "Small models in a loop, under `patch`",
    "products": "Single products in a loop, `host` beside XLA's own",
}
# Suites that compare configs, which the table of suites leaves out.
_OF_CONFIGS = ("packed_configs", "packed_wide_configs", "packed_dequantizing_configs")
# Longer suites are shown by their chart alone.
_MAX_ROWS = 64
_NO_RECORDS = "No records are committed yet."


def render(root: pathlib.Path, check: bool = False) -> list[pathlib.Path]:
    """Brings README.md, benchmarks/README.md and benchmarks/charts up to date with the records.

    Args:
      root: the checkout.
      check: only compare; write nothing.

    Returns:
      The files that were (or, with `check`, would be) changed, relative to `root`.

    Raises:
      ValueError: when a file lacks the markers or a record cannot be read.
    """
    paths = sorted((root / _RESULTS).glob("*.jsonl"))
    everything = [*rec.read_records(paths), *rec.read_trainings(root / _RESULTS)]
    products = rec.products(everything)
    changed = []
    for name, chart_records in charts([*products, *rec.workloads(everything)]).items():
        path = root / _CHARTS / f"{name}.png"
        digest = records_digest(chart_records)
        if path.exists() and digest.encode() in path.read_bytes():
            continue
        changed.append(path)
        if not check:
            from jax_tcgemm.bench.plot import plot

            plot(chart_records, path, digest)
    changed += _highlights_chart(root / _CHARTS / "highlights.png", everything, check)
    for device, sweeps in _by_device(rec.sweeps(everything)).items():
        changed += _sweep_chart(root / _CHARTS / _sweep_chart_name(device), sweeps, check)
    for path, section in (
        (root / "README.md", summary_section(everything)),
        (root / "benchmarks/README.md", full_section(everything)),
    ):
        old = path.read_text(encoding="utf-8")
        new = replace_section(old, section, path.name)
        if new != old:
            changed.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    return [path.relative_to(root) for path in changed]


def _by_device(records: Sequence[dict]) -> dict[str, list[dict]]:
    """Records by the GPU that they were measured on."""
    found: dict[str, list[dict]] = {}
    for record in records:
        found.setdefault(record["machine"]["device"], []).append(record)
    return found


def _sweep_chart_name(device: str) -> str:
    """Such as sweep-nvidia-h200.png."""
    return f"sweep-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.png"


def _sweep_chart(path: pathlib.Path, records: Sequence[dict], check: bool) -> list[pathlib.Path]:
    """Draws the chart of random problems, and returns its path if it was out of date."""
    digest = records_digest(records)
    if path.exists() and digest.encode() in path.read_bytes():
        return []
    if not check:
        from jax_tcgemm.bench.plot import plot_sweep

        plot_sweep(records, path, digest)
    return [path]


def _highlights_chart(
    path: pathlib.Path, records: Sequence[dict], check: bool
) -> list[pathlib.Path]:
    """Draws the README's chart, and returns its path if it was out of date."""
    shown = highlights.shown(records)
    digest = records_digest([*shown, *map(dataclasses.asdict, highlights.WORK)])
    if not shown or (path.exists() and digest.encode() in path.read_bytes()):
        return []
    if not check:
        highlights.plot_highlights(records, path, digest)
    return [path]


def charts(records: Sequence[dict]) -> dict[str, list[dict]]:
    """The records of each chart, by the chart's name: one chart a suite."""
    by_suite: dict[str, list[dict]] = {}
    for record in records:
        by_suite.setdefault(record["suite"], []).append(record)
    return {suite: by_suite[suite] for suite in suite_names() if suite in by_suite}


def records_digest(records: Sequence[dict]) -> str:
    """Tells whether a chart shows these records."""
    text = "\n".join(json.dumps(record, sort_keys=True) for record in records)
    return hashlib.sha256(text.encode()).hexdigest()


def replace_section(text: str, section: str, name: str) -> str:
    """Puts `section` between the markers of `text`."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"bench: {name} must have the markers {BEGIN} and {END}, got a file without one; "
            "put both where the tables belong"
        )
    return f"{before}{BEGIN}\n{section.strip()}\n{END}{after}"


def summary_section(records: Sequence[dict]) -> str:
    """The main README: one bar for each kind of work."""
    both = [*rec.products(records), *rec.workloads(records)]
    found = highlights.bars(records)
    if not found:
        return _NO_RECORDS
    text = ", ".join(f"{title} {ratio:.2f}" for title, ratio in found)
    kinds = {record["kind"] for record in highlights.shown(records)}
    steps = "\nFor training steps and programs of several GPUs, the time is wall-clock time."
    return (
        f"![XLA's time over ours: {text}](benchmarks/charts/highlights.png)\n\n"
        "Each bar is the peer's time divided by this library's time, a geometric mean over cases.\n"
        "Above 1, this library is faster. The peer is XLA. For weights of 4 and 8 bits, the peer\n"
        "is this library's product with bfloat16 weights.\n"
        f"{_provenance(both)}{steps if kinds & {'training', 'parallel'} else ''}"
    )


def full_section(records: Sequence[dict]) -> str:
    """benchmarks/README.md: every case of every suite."""
    products, workloads = rec.products(records), rec.workloads(records)
    if not products:
        return _NO_RECORDS
    groups = rec.grouped([*products, *workloads])
    parts = [
        _provenance([*products, *workloads]),
        "Every suite, with the ratio of the best peer's time to ours (above 1, ours is faster):",
        _ratios_table({k: group for k, group in groups.items() if k[0] not in _OF_CONFIGS}),
    ]
    for suite in charts(products):
        parts.append(f"### {suite}\n\n![{suite}](charts/{suite}.png)")
        for (name, dtype), group in rec.grouped(products).items():
            if name == suite and len({_case_key(r) for r in group}) <= _MAX_ROWS:
                parts += [f"{dtype}, TFLOP/s:", _rates_table(group)]
    for suite in charts(workloads):
        parts.append(f"### {suite}\n\n![{suite}](charts/{suite}.png)")
        for (name, dtype), group in rec.grouped(workloads).items():
            if name == suite:
                parts += [f"{dtype}, µs, and the memory of the call in MB:", _times_table(group)]
    others = _overhead_table(records), _parallel_table(records), _decode_table(records)
    parts += filter(None, (_flags_note(groups), *others))
    parts += _program_tables(records)
    sweeps = _by_device(rec.sweeps(records))
    if sweeps:
        parts.append("### sweep")
    for device, of_device in sweeps.items():
        parts += _sweep_tables(device, of_device)
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are aligned left, the others right."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def _sweep_tables(device: str, records: Sequence[dict]) -> list[str]:
    """XLA's time over ours by kind of random problems, and every problem that is slower."""
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(record["seed"] for record in records))
    head = ("kind", "problems", "geomean", *(f"{q} %" for q in sweep.QUANTILES))
    rows = [
        (kind, str(number), f"{geomean:.3f}", *(f"{value:.3f}" for value in values))
        for kind, number, geomean, values in sweep.quantiles(records)
    ]
    slow = sorted(filter(sweep.is_slow, records), key=lambda record: record["ratio"])
    faults = [
        (r["problem"], f"{r['us']:.4g}", f"{r['xla_us']:.4g}", f"{r['ratio']:.3f}", r["ran"][0])
        for r in slow
    ]
    return [
        f"{len(records)} random problems (seeds {seeds}), {device}: XLA's time over that of the "
        "default choice, its geometric mean and quantiles.",
        f"![sweep](charts/{_sweep_chart_name(device)})",
        _table(head, rows),
        f"Slower than XLA by more than {1 - sweep.LEAST_RATIO:.0%} and {sweep.FORGIVEN_US} µs:",
        _table(("problem", "µs", "XLA, µs", "ratio", "ran first"), faults) if faults else "None.",
    ]


def _provenance(products: Sequence[dict]) -> str:
    def values(key: str) -> str:
        found = {str(r["machine"][key]) for r in products if r["machine"].get(key)}
        return ", ".join(sorted(found)) or "unknown"

    days = sorted(r["time"][:10] for r in products)
    timers = {
        "trace": "device times by CUPTI, NVIDIA's profiling interface",
        "chained": "wall-clock time of chained calls",
        "wall": "wall-clock time",
    }
    how = ", ".join(timers[t] for t in sorted({r["timer"] for r in products}))
    samples = min(r["samples"] for r in products)
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    return (
        f"GPUs: {values('device')}; driver {values('driver')}, JAX {values('jax')}; {when}.\n"
        f"A time is the median of at least {samples} calls, measured as {how}.\n"
        "The calls of this library and of its peers alternate."
    )


def _case_key(record: dict) -> tuple:
    return tuple(record[k] for k in ("label", "batch", "m", "n", "k", "layout"))


def _rates_table(group: Sequence[dict]) -> str:
    """TFLOP/s of every contender, a row for each case; of one or two of ours also the ratio."""
    cases: dict[tuple, dict[str, dict]] = {}
    for record in group:
        cases.setdefault(_case_key(record), {})[rec.contender_name(record)] = record
    ours = rec.contenders(group)
    present = {peer for record in group for peer in record["peers"]}
    peers = [peer for peer in _PEERS if peer in present and peer not in ours]
    compared = ours if len(ours) <= 2 else []
    ratios = [f"{name} : best peer" for name in compared]
    head = ["M×N×K", *ours, *(_PEERS[p] for p in peers), *ratios]
    rows = []
    for by_name in cases.values():
        some = next(iter(by_name.values()))
        row = [_case_title(some)]
        row += [f"{by_name[n]['tflops']:.4g}" if n in by_name else "–" for n in ours]
        # Of the run that our choice was measured in, where it was.
        beside = [by_name["auto"]] if "auto" in by_name else by_name.values()
        for peer in peers:
            rates = [rec.record_tflops(r, peer) for r in beside if peer in r["peers"]]
            row.append(f"{max(rates):.4g}" if rates else "–")
        for name in compared:
            ratio = by_name[name]["ratio"] if name in by_name else None
            row.append("–" if ratio is None else f"{ratio:.3f}")
        rows.append(row)
    return _table(head, rows)


def _times_table(group: Sequence[dict]) -> str:
    """Time and memory of every contender of workloads, a row for each."""
    cases: dict[tuple, dict[str, dict]] = {}
    for record in group:
        cases.setdefault((record["label"], record["shape"]), {})[record["implementation"]] = record
    ours = list(dict.fromkeys(record["implementation"] for record in group))
    peers = list(dict.fromkeys(peer for record in group for peer in record["peers"]))
    parts = list(dict.fromkeys(part for record in group for part in record.get("parts", ())))

    def cell(measured: dict | None) -> str:
        if measured is None:
            return "–"
        peak = measured["peak_bytes"]
        return f"{measured['us']['p50']:.4g}" + (f" ({peak / 1e6:.4g})" if peak else "")

    rows = []
    for (label, shape), by_name in cases.items():
        of_peers = {name: p for r in by_name.values() for name, p in r["peers"].items()}
        of_parts = {name: p for r in by_name.values() for name, p in r.get("parts", {}).items()}
        ratios = [by_name[name]["ratio"] if name in by_name else None for name in ours]
        for name, part in itertools.product(ours, parts):
            beside = by_name.get(name, {}).get("parts", {})
            ratios.append(beside[part]["ratio"] if part in beside else None)
        rows.append(
            [
                f"{label} {shape}".strip(),
                *(cell(by_name.get(name)) for name in ours),
                *(cell(of_peers.get(name)) for name in peers),
                *(cell(of_parts.get(name)) for name in parts),
                *("–" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
            ]
        )
    head = ["case", *ours, *(_PEERS.get(p, p) for p in peers), *parts]
    head += [f"{name} : best peer" for name in ours]
    head += [f"{name} : {part}" for name, part in itertools.product(ours, parts)]
    return _table(head, rows)


def _case_title(record: dict) -> str:
    fields = ("suite", "label", "batch", "m", "n", "k", "dtype", "layout")
    case = Case(**{name: record[name] for name in fields})
    layout = "" if case.layout == "NN" else f" {case.layout}"
    title = f"{case.size}³" if case.size else case.shape
    return f"{title}{layout}" + (f" ({case.label})" if case.label else "")


def _ratios_table(groups: dict[tuple[str, str], list[dict]]) -> str:
    """Render a table of ratios: for each suite our own choice if measured, else all contenders."""
    rows = []
    for (suite, dtype), group in groups.items():
        ratios: dict[str, list[float]] = {}
        for record in group:
            if record["ratio"] is not None:
                ratios.setdefault(rec.contender_name(record), []).append(record["ratio"])
        for name, values in ratios.items():
            if "auto" in ratios and name != "auto":
                continue
            mean = math.exp(sum(map(math.log, values)) / len(values))
            numbers = (f"{min(values):.3f}", f"{mean:.3f}", f"{max(values):.3f}")
            rows.append([suite, dtype, name, str(len(values)), *numbers])
    head = ["suite", "dtype", "implementation", "cases", "least", "geomean", "most"]
    return _table(head, rows, left=3)


def _flags_note(groups: dict[tuple[str, str], list[dict]]) -> str:
    """Which suites were measured under flags of XLA's."""
    flags: dict[str, list[str]] = {}
    for (suite, _), group in groups.items():
        for found in {r["machine"].get("xla_flags", "") for r in group} - {""}:
            flags.setdefault(found, []).append(suite)
    return "\n\n".join(
        f"Measured with `XLA_FLAGS={found}`: {', '.join(dict.fromkeys(suites))}."
        for found, suites in flags.items()
    )


def _overhead_table(records: Sequence[dict]) -> str:
    newest = rec.newest(records, "overhead", operator.itemgetter("calls_per_step"))
    if not newest:
        return ""
    rows = [
        [
            str(calls),
            f"{record['us']['p50']:.1f}",
            f"{record['xla_us']['p50']:.1f}",
            f"{record['overhead_us']:+.2f}",
        ]
        for calls, record in sorted(newest.items())
    ]
    head = ["products a step", "jax_tcgemm, µs", "lax.dot_general, µs", "difference a call, µs"]
    return "Host time of a jitted step of tiny products:\n\n" + _table(head, rows)


def _parallel_table(records: Sequence[dict]) -> str:
    sizes = operator.itemgetter("devices", "tokens", "model", "hidden", "dtype")
    newest = rec.newest(records, "parallel", sizes)
    if not newest:
        return ""
    rows = [
        [str(devices), f"{tokens} tokens, {model} → {hidden} → {model}, {dtype}", *row]
        for (devices, tokens, model, hidden, dtype), record in sorted(newest.items())
        for row in parallel.rows(record)
    ]
    head = ["devices", "layer", *parallel.HEAD]
    return (
        "A tensor-parallel MLP, forward and backward, wall-clock time of a step (what each row is: "
        "`jax_tcgemm/bench/parallel.py`):\n\n" + _table(head, rows, left=3)
    )


def _decode_table(records: Sequence[dict]) -> str:
    sizes = operator.itemgetter("devices", "model", "hidden", "rows")
    newest = rec.newest(records, "decode", sizes)
    if not newest:
        return ""
    rows = [
        [str(devices), f"{model} → {hidden} → {model}", *decode.row(record)]
        for (devices, model, hidden, _), record in sorted(newest.items())
    ]
    head = ["devices", "layer", *decode.HEAD]
    return (
        "Decode steps of a tensor-parallel MLP in bfloat16, wall-clock microseconds of a layer, "
        "and what the sums add to a layer (what each column is: `jax_tcgemm/bench/decode.py`):\n\n"
        + _table(head, rows, left=2)
    )


def _program_tables(records: Sequence[dict]) -> list[str]:
    """Small models and single products in loops, a table of each for each machine."""
    newest: dict[tuple, dict[tuple, dict]] = {}
    for record in sorted(records, key=lambda r: r["time"]):
        if record["kind"] == "program":
            machine = record["machine"]
            group = newest.setdefault((record["group"], machine["device"], machine["jax"]), {})
            group[record["label"], record["dtype"]] = record
    return [
        f"{_PROGRAMS[group]}, {device}, JAX {jax}, microseconds of a step:\n\n"
        + _table(programs.HEAD, [programs.row(record) for record in found.values()], left=3)
        for (group, device, jax), found in newest.items()
    ]
