"""The benchmark's records, and the tables and charts that are made of them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from bench_cases import make_record, make_records

from jax_tcgemm.bench import overhead, records, render

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(tmp_path):
    """A folder with the documents that are rendered, and records."""
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    for name in ("README.md", "benchmarks/README.md"):
        (tmp_path / name).write_text(f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n")
    llama = [
        make_record("auto", suite="llama", m=m, us=20.0, peer_us=peer_us)
        for m, peer_us in ((512, 20.0), (1024, 80.0))
    ]
    records.append_records(tmp_path / "benchmarks/results/a.jsonl", [*make_records(), *llama])
    return tmp_path


def test_committed_records_name_no_folder_of_a_machine():
    for path in (REPOSITORY / "benchmarks/results").iterdir():
        found = re.search(r"(?<![\w./])/(?:[\w.+-]+/)+[\w.+-]+", path.read_text())
        assert found is None, f"{path.name} names {found[0]}"


def test_suites_of_configs_are_not_in_the_table_of_suites(checkout):
    path = checkout / "benchmarks/results/b.jsonl"
    configs = [make_record(suite="packed_configs", m=m) for m in (1, 16)]
    records.append_records(path, configs)
    render.render(checkout)
    text = (checkout / "benchmarks/README.md").read_text()
    assert "### packed_configs" in text
    assert "| packed_configs |" not in text


def test_render_writes_tables_and_charts_once(checkout):
    stale = render.render(checkout, check=True)
    assert "old" in (checkout / "README.md").read_text()
    assert render.render(checkout) == stale
    charts = {"squares.png", "decode.png", "llama.png", "highlights.png"}
    assert {path.name for path in stale} == {"README.md", *charts}
    assert render.render(checkout) == []
    text = (checkout / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "NVIDIA H200; driver 580.1, JAX 0.11.2" in text
    assert "Large dense products of LLMs (2 cases, H200) 2.00]" in text  # of 1 and 4
    full = (checkout / "benchmarks/README.md").read_text()
    assert "| squares | bf16 | wgmma | 3 | 0.278 | 0.556 | 1.111 |" in full
    assert re.search(r"\| 1024³ \| 53.69 \| 119.3 \| 214.7 \| 0.250 \| 0.556 \|", full)
    assert "| 16×512×512 (qkv) |" in full
    # New records, new charts: only those of their suite.
    records.append_records(
        checkout / "benchmarks/results/b.jsonl",
        [make_record(suite="decode", label="qkv", m=64)],
    )
    names = [path.name for path in render.render(checkout)]
    assert names == ["decode.png", "README.md"]
    assert "Large dense" in (checkout / "README.md").read_text()
    # Training steps are files of their own.
    trainings = {"stock Flax": 33.0, "stock Flax, accelerated": 30.0, "jax_tcgemm": 22.0}
    trainings = {name: {"step_ms": step_ms} for name, step_ms in trainings.items()}
    training = {"device": "NVIDIA H100 80GB HBM3", "trainings": trainings}
    path = checkout / "benchmarks/results/h100-train_gpt-accelerate.json"
    path.write_text(json.dumps(training))
    assert {path.name for path in render.render(checkout)} == {"highlights.png", "README.md"}
    text = (checkout / "README.md").read_text()
    assert "stock Flax, accelerated (1 case, H100) 1.10, GPT training step by the" in text
    assert "layers (1 case, H100) 1.50" in text
    assert "For training steps and programs of several GPUs, the time is wall-clock time." in text


def test_newer_records_replace_older_ones_of_the_same_case():
    old = make_record(us=20.0)
    new = make_record(us=10.0, time="2026-02-01T00:00:00+00:00")
    other = make_record("wgmma")
    forced = make_record(forced_config="128x128x32")
    assert records.products([new, old, other, forced]) == [other, forced, new]


def test_documents_without_markers_or_bad_records_are_refused(checkout):
    (checkout / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match=r"README\.md must have the markers"):
        render.render(checkout, check=True)
    (checkout / "benchmarks/results/c.jsonl").write_text('{"schema": 99}\n')
    with pytest.raises(ValueError, match=r"c.jsonl:1 must have schema 1, got 99"):
        render.render(checkout, check=True)


def test_overhead_records_are_rendered():
    found = overhead.measure_overhead(samples=2)
    section = render.full_section([*make_records(), *found])
    assert "| products a step |" in section
    assert render.summary_section(found) == render.summary_section([])


def test_programs_are_rendered():
    def program(label, ratio, **changes):
        us = {"p10": 1.0, "p50": 2.0, "p90": 3.0}
        machine = {"device": "A CPU x 2", "jax": "0.12"}
        return {
            **{"kind": "program", "group": "models", "label": label, "dtype": "", "ratio": ratio},
            "processor_ratio": ratio / 2,
            **{"time": "2026-01-01", "us": us, "plain_us": us, "ran": {"xla": 2, "host": 1}},
            **{"identical": False, "machine": machine},
        } | changes

    found = [
        program("net", 0.5),
        program("net", 1.25, time="2026-01-02"),
        program("same", 1.0, identical=True),
        program("8×8×8 NN", 0.25, group="products", dtype="f32"),
    ]
    section = render.full_section([*make_records(), *found])
    assert "under `patch`, A CPU x 2, JAX 0.12" in section
    assert "| net |  | 2 xla, 1 host | 2 | 2 | 1.25 | 0.62 |" in section
    assert "| same |  | 2 xla, 1 host | 2 | 2 | identical | identical |" in section
    assert "| 8×8×8 NN | f32 | 2 xla, 1 host | 2 | 2 | 0.25 | 0.12 |" in section


def test_committed_documents_show_the_committed_records():
    stale = render.render(REPOSITORY, check=True)
    assert stale == [], "run: python -m jax_tcgemm bench render"


@pytest.mark.parametrize("which", ["squares", "decode", "no_peers", "many_cases"])
def test_plots_show_something(which, tmp_path):
    from matplotlib import image

    from jax_tcgemm.bench.plot import plot

    shown = [r for r in make_records() if r["suite"] == which]
    if which == "no_peers":
        shown = [make_record() | {"peers": {}, "ratio": None}]
    if which == "many_cases":
        shown = [make_record(m=m, peer_us=10.0 + m / 100) for m in range(1, 200)]
    path = tmp_path / "new" / "chart.png"
    plot(shown, path, "digest")
    pixels = image.imread(path)[..., :3]
    height, width, _ = pixels.shape
    assert width > 800
    assert height > 150
    inked = np.mean(np.any(pixels < 0.9, axis=-1))
    assert 0.005 < inked < 0.5
    colours = {tuple(c) for c in np.round(pixels.reshape(-1, 3) * 255).astype(int)}
    assert (0xCC, 0x79, 0xA7) in colours


def test_plot_needs_records(tmp_path):
    from jax_tcgemm.bench.plot import plot

    with pytest.raises(ValueError, match="at least one record"):
        plot([], tmp_path / "x.png")
