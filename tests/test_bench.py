"""The benchmark: suites, timing from traces, checks, records, charts, rendered documentation."""

import functools
import json
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rich.console import Console

import jax_tcgemm
from jax_tcgemm.bench import (
    contenders,
    harness,
    overhead,
    parallel,
    records,
    reference,
    render,
    suites,
    timing,
)
from jax_tcgemm.bench.suites import Case
from jax_tcgemm.bench.workload import Workload

REPOSITORY = Path(__file__).resolve().parents[1]


def make_case(**changes) -> Case:
    fields = {"suite": "test", "label": "", "batch": 1, "m": 24, "n": 40, "k": 56}
    return Case(**(fields | {"dtype": "f32", "layout": "NN"} | changes))


# Suites


@pytest.mark.parametrize("name", suites.suite_names())
def test_every_suite_loads(name):
    suite = suites.load_suite(name)
    assert suite.cases
    assert suite.description
    assert len(set(suite.cases)) == len(suite.cases)


def test_suites_hold_the_shapes_they_are_named_after():
    def shapes(name):
        return {(c.m, c.n, c.k, c.layout) for c in suites.load_suite(name).cases}

    assert {(s, s, s, "NN") for s in (128, 2048, 16384)} <= shapes("squares")
    assert (128, 24576, 1536, "NN") in shapes("deepseek128")
    assert (1, 28672, 4096, "NN") in shapes("decode")
    assert (4097, 4095, 4104, "NN") in shapes("unaligned")
    assert len(shapes("residues")) == 512
    # The gradients of a projection from 4096 to 6144 with 8192 tokens.
    llama = {(8192, 6144, 4096, "NN"), (8192, 4096, 6144, "NT"), (4096, 6144, 8192, "TN")}
    assert llama <= shapes("llama")


@pytest.mark.parametrize("layout", suites.LAYOUTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_case_describes_the_product_it_stands_for(batch, layout):
    case = make_case(batch=batch, layout=layout)
    a = jnp.ones(case.a_shape)
    b = jnp.ones(case.b_shape)
    out = lax.dot_general(a, b, case.dimension_numbers)
    assert out.shape == ((batch, 24, 40) if batch > 1 else (24, 40))
    assert np.all(out == 56)
    assert case.flops == 2 * batch * 24 * 40 * 56
    assert case.bytes == a.nbytes + b.nbytes + out.nbytes


def test_suite_keys_multiply_out():
    table = {
        "description": "",
        "dtypes": ["bf16", "f16"],
        "groups": [{"m": [1, 2], "n": 3, "k": [4, 5], "layout": ["NN", "TT"], "batch": 6}],
    }
    assert len(suites.parse_suite("x", table).cases) == 16
    assert len(suites.parse_suite("x", table, ["int8"]).cases) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": [{"m": 1, "n": 1, "k": 1, "rows": 2}]}, "unknown keys"),
        ({"groups": [{"size": 1, "layout": "XY"}]}, "layout must be one of"),
        ({"dtypes": ["f12"]}, "dtype must be one of"),
        ({"shapes": []}, "unknown keys"),
    ],
)
def test_malformed_suites_are_refused(change, message):
    table = {"description": "", "dtypes": ["bf16"], "groups": [{"size": 8}]} | change
    with pytest.raises(ValueError, match=message):
        suites.parse_suite("x", table)


def test_unknown_suite_is_refused():
    with pytest.raises(ValueError, match=r"suite must be one of .*squares.*got suite='nope'"):
        suites.load_suite("nope")


# Inputs and checks


@pytest.mark.parametrize("dtype", suites.DTYPES)
def test_check_accepts_xla_and_rejects_one_wrong_element(dtype, x64):
    case = make_case(dtype=dtype, layout="NT", k=300)
    (a, b), (other, _) = reference.make_inputs(case, 2)
    assert not np.array_equal(a, other)
    assert a.dtype == case.element_type
    preferred = case.out_type if case.out_type != case.element_type else None
    good = lax.dot_general(
        a, b, case.dimension_numbers, precision=case.precision, preferred_element_type=preferred
    )
    assert good.dtype == case.out_type
    bad = good.at[3, 5].add(100)
    missing = good.at[3, 5].set(jnp.nan) if jnp.issubdtype(good.dtype, jnp.inexact) else bad
    errors = reference.errors(case, (a, b), [good, bad, missing])
    limit = reference.tolerance(case)
    assert errors[0] <= limit
    assert errors[1] > limit
    assert not errors[2] <= limit


def test_float_inputs_are_normal_and_integers_fill_their_range():
    ((a, _),) = reference.make_inputs(make_case(m=256, k=256, dtype="bf16"), 1)
    values = np.asarray(a, np.float64)
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.02
    ((a, _),) = reference.make_inputs(make_case(m=256, k=256, dtype="int8"), 1)
    assert (a.min(), a.max()) == (-128, 127)


# Timing


def xspace(activities, plane="/device:GPU:0", line="Stream #14(Compute)"):
    """A profile as XLA writes it for a GPU; activities are (module, start ns, duration ns)."""
    modules = list(dict.fromkeys(module for module, _, _ in activities))
    events = "".join(
        f"events {{ metadata_id: 1 offset_ps: {start * 1000} duration_ps: {duration * 1000}"
        f" stats {{ metadata_id: 1 ref_value: {10 + modules.index(module)} }}"
        " stats { metadata_id: 2 uint64_value: 3 } }"
        for module, start, duration in activities
    )
    names = {1: "hlo_module", 2: "program_id"} | {10 + i: name for i, name in enumerate(modules)}
    stats = "".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        for i, name in names.items()
    )
    text = f"""
      planes {{ name: "{plane}"
        lines {{ id: 1 name: "{line}" timestamp_ns: 0 {events} }}
        event_metadata {{ key: 1 value {{ id: 1 name: "gemm_kernel" }} }} {stats} }}
    """
    profile = jax.profiler.ProfileData
    return profile.from_serialized_xspace(profile.text_proto_to_serialized_xspace(text))


def test_trace_gives_the_device_time_of_each_call_with_its_helper_kernels():
    data = xspace(
        [
            ("jit_ours", 0, 5_000),  # pads
            ("jit_ours", 6_000, 20_000),
            ("jit_flush", 30_000, 99_000),
            ("jit_peer", 200_000, 40_000),
            ("jit_ours", 300_000, 6_000),
            ("jit_ours", 310_000, 22_000),
            ("jit_peer", 400_000, 44_000),
        ]
    )
    times = timing.device_times(data, {"jit_ours": 2, "jit_peer": 2})
    assert times["jit_ours"] == timing.Timing((25.0, 28.0), "trace", 2)
    assert times["jit_peer"] == timing.Timing((40.0, 44.0), "trace", 1)
    assert times["jit_peer"].percentile(50) == 42.0


def test_time_in_which_kernels_of_a_call_overlap_counts_once():
    data = xspace(
        [
            ("jit_ours", 0, 10_000),
            ("jit_ours", 7_000, 5_000),  # begins before the first one's end
            ("jit_ours", 8_000, 1_000),  # and lies within the others
            ("jit_ours", 20_000, 4_000),
            ("jit_ours", 24_000, 2_000),
            ("jit_ours", 30_000, 1_000),
        ]
    )
    times = timing.device_times(data, {"jit_ours": 2})
    assert times["jit_ours"] == timing.Timing((12.0, 7.0), "trace", 3)


@pytest.mark.parametrize(
    ("kwargs", "calls"),
    [
        ({}, 2),  # three activities do not divide among two calls
        ({"plane": "/host:CPU"}, 3),
        ({"line": "XLA Modules"}, 3),
    ],
    ids=["indivisible", "host_plane", "summary_line"],
)
def test_trace_without_the_calls_is_refused(kwargs, calls):
    data = xspace([("jit_ours", 0, 1), ("jit_ours", 5, 1), ("jit_ours", 9, 1)], **kwargs)
    with pytest.raises(timing.TraceError, match="activities of jit_ours"):
        timing.device_times(data, {"jit_ours": calls})


def test_inputs_are_rotated_past_the_cache():
    assert timing.num_input_sets(1 << 30, 60 << 20) == 2
    assert timing.num_input_sets(24 << 20, 60 << 20) == 10
    assert timing.num_input_sets(1 << 10, 60 << 20) == timing.MAX_SETS


@pytest.mark.parametrize("timer", ["wall", "chained"])
def test_contenders_are_interleaved_and_slow_ones_get_fewer_calls(timer):
    calls = []

    def contender(name):
        def function(a, b):
            jax.debug.callback(lambda: calls.append(name), ordered=True)
            return a + b

        return timing.Runnable(name, f"jit_{name}", jax.jit(function))

    sets = [(jnp.ones(2), jnp.ones(2))] * 3
    found = timing.measure([contender("x"), contender("y")], sets, [3, 1], timer=timer)
    assert [len(found[name].us) for name in "xy"] == [3, 1]
    assert all(us > 0 for us in found["x"].us)
    if timer == "wall":
        jax.effects_barrier()
        assert calls == ["x", "y", "x", "x"]


@pytest.mark.gpu
def test_device_time_on_a_gpu_is_no_longer_than_the_wall_clock(gpu):
    case = make_case(m=1024, n=1024, k=1024, dtype="bf16")
    sets = reference.make_inputs(case, 4)
    asked = ["auto", "xla"]
    planned, refused = contenders.plan(case, asked, [], None)
    assert not refused
    runnables = [timing.Runnable(c.name, c.module, c.function) for c in planned]
    for runnable in runnables:
        jax.block_until_ready(runnable.function(*sets[0]))
    device = timing.measure(runnables, sets, [8, 5], timer="trace", flush_bytes=1 << 27)
    wall = timing.measure(runnables, sets, [8, 5], timer="wall")
    for name, calls in zip(asked, [8, 5], strict=True):
        assert len(device[name].us) == calls
        assert device[name].kernels >= 1
        # No GPU multiplies these faster than in a microsecond.
        assert 1 < device[name].percentile(50) < wall[name].percentile(50)


# The harness, on whatever device this is


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The smoke suite, measured: the harness and the file it wrote."""
    out = tmp_path_factory.mktemp("bench") / "records.jsonl"
    peers = contenders.parse_peers("xla,cublaslt")
    options = harness.Options(["auto", "xla"], peers, repeats=6, revision="abc")
    runner = harness.Harness(options, Console(quiet=True), out)
    runner.run([suites.load_suite("smoke")])
    return runner, out


def test_harness_records_every_case(smoke):
    runner, out = smoke
    assert not runner.wrong
    found = records.read_records([out])
    assert found == json.loads(json.dumps(runner.records))
    cases = suites.load_suite("smoke").cases
    assert len(found) == 2 * len(cases)
    for record in found:
        assert record["samples"] == 6
        assert 0 < record["us"]["p10"] <= record["us"]["p50"] <= record["us"]["p90"]
        flops = 2 * record["batch"] * record["m"] * record["n"] * record["k"]
        assert record["tflops"] == pytest.approx(flops / record["us"]["p50"] / 1e6, rel=1e-3)
        assert record["error"] < 1e-2
        assert record["revision"] == "abc"
        assert record["machine"]["jax"] == jax.__version__
        assert record["ran"] in contenders.device_implementations()
        assert record["why"]
    ours = [r for r in found if r["implementation"] == "auto"]
    for record in ours:
        name, us = records.best_peer(record)
        assert record["ratio"] == pytest.approx(us / record["us"]["p50"], rel=1e-3)
        assert record["peers"][name]["us"]["p50"] == us
    assert all("xla" not in r["peers"] for r in found if r["implementation"] == "xla")


def test_wrong_results_are_never_recorded(monkeypatch):
    case = make_case()

    def product(a, b):
        return lax.dot_general(a, b, case.dimension_numbers).at[0, 0].add(1000)

    wrong = contenders.Contender(
        "bad", "xla", True, "xla", None, "", "", "jit_bad", jax.jit(product)
    )
    monkeypatch.setattr(harness, "plan", lambda *_: ([wrong], {}))
    runner = harness.Harness(harness.Options(["xla"], []), Console(quiet=True))
    runner.run([suites.Suite("test", "", (case,))])
    assert runner.records == []
    assert "bad on 24×40×56: error" in runner.wrong[0]


def test_a_failure_is_told_and_the_other_cases_are_measured(monkeypatch):
    real = reference.make_inputs

    def make_inputs(case, num_sets):
        if case.m == 24:
            raise MemoryError("no room\nfor this")
        return real(case, num_sets)

    monkeypatch.setattr(reference, "make_inputs", make_inputs)
    runner = harness.Harness(harness.Options(["xla"], [], repeats=5), Console(quiet=True))
    runner.run([suites.Suite("test", "", (make_case(), make_case(m=25)))])
    assert [r["m"] for r in runner.records] == [25]
    assert runner.wrong == ["the case failed on 24×40×56: no room"]


def make_workload(**changes) -> Workload:
    """x w and its transpose, by ours and in two ways more."""

    def both(product):
        def function(x, w, shift):
            return product(x, w) + shift.astype(x.dtype), product(x, w).T

        return function

    fields = {
        "suite": "smoke",
        "label": "both",
        "dtype": "bf16",
        "shape": "8×12×16",
        "sizes": {"m": 8},
        "operands": (
            jax.ShapeDtypeStruct((8, 16), jnp.bfloat16),
            jax.ShapeDtypeStruct((16, 12), jnp.bfloat16),
            jax.ShapeDtypeStruct((), jnp.int8),
        ),
        "ours": {"ours": both(functools.partial(jax_tcgemm.matmul, implementation="host"))},
        "peers": {"jnp": both(jnp.matmul), "nn": both(lambda x, w: lax.dot(x, w))},
        "reference": both(lambda x, w: jnp.matmul(x, w, precision="highest")),
        "tolerance": 0.01,
        "flops": 4 * 8 * 12 * 16,
    }
    return Workload(**fields | changes)


def test_workloads_are_recorded_beside_their_peers(tmp_path):
    workload = make_workload()
    assert workload.bytes == 2 * (8 * 16 + 16 * 12 + 2 * 8 * 12) + 1
    out = tmp_path / "records.jsonl"
    runner = harness.Harness(harness.Options(["auto"], [], repeats=5), Console(quiet=True), out)
    runner.run([suites.Suite("test", "", (workload,))])
    assert not runner.wrong
    (record,) = records.read_records([out])
    assert (record["kind"], record["shape"], record["sizes"]) == ("workload", "8×12×16", {"m": 8})
    assert (record["implementation"], record["ran"]) == ("ours", "host")
    assert record["peers"].keys() == {"jnp", "nn"}
    assert record["error"] < 0.01
    assert record["ratio"] > 0
    # Operands and results at least; each product makes a temporary at most as large.
    assert workload.bytes <= record["peak_bytes"] <= 2 * workload.bytes + 128
    assert records.workloads([record, record]) == [record]
    section = render.full_section([make_record(), record])
    assert "| both 8×12×16 | " in section
    assert "| case | ours | jnp | nn | ours : best peer |" in section


def test_a_wrong_array_of_several_is_found():
    def wrong(x, w, shift):
        return lax.dot(x, w) + shift.astype(x.dtype), lax.dot(x, w).T.at[3, 2].add(9)

    workload = make_workload(peers={"wrong": wrong})
    runner = harness.Harness(harness.Options(["auto"], [], repeats=5), Console(quiet=True))
    runner.run([suites.Suite("test", "", (workload,))])
    assert [r["peers"] for r in runner.records] == [{}]
    assert "wrong on 8×12×16: error" in runner.wrong[0]


def test_workloads_draw_their_own_operands():
    shapes = make_workload().operands

    def draw(key):
        return tuple(jnp.ones(x.shape, x.dtype) for x in shapes)

    ((x, w, shift),) = reference.make_inputs(make_workload(draw=draw), 1)
    assert (x.shape, w.shape, shift.shape) == ((8, 16), (16, 12), ())
    assert float(jnp.sum(x.astype(jnp.float32))) == 8 * 16


def test_suite_files_name_the_module_that_makes_their_workloads(monkeypatch):
    module = types.ModuleType("jax_tcgemm.bench.invented")
    module.workloads = lambda suite, group, dtype: [
        make_workload(suite=suite, dtype=dtype, label=group["label"])
    ]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    groups = [{"label": "one"}, {"label": "two"}]
    table = {"description": "", "workload": "invented", "dtypes": ["f16"], "groups": groups}
    cases = suites.parse_suite("x", table).cases
    assert [case.title for case in cases] == ["x f16 one 8×12×16", "x f16 two 8×12×16"]


def test_fused_layers_are_measured_beside_the_expressions():
    runner = harness.Harness(harness.Options(["auto"], [], repeats=5), Console(quiet=True))
    runner.run([suites.load_suite("smoke_fused")])
    assert not runner.wrong
    found = {(r["label"], r["implementation"]): r for r in runner.records}
    assert {label for label, _ in found} == {
        *("bias+gelu", "bias+relu2", "silu", "gelu", "gated gelu"),
    }
    assert len(found) == len(runner.records) == 10
    assert all("xla" in r["peers"] for r in runner.records)
    # The block keeps the hidden layer, its pre-activation, and one gradient of them.
    assert (
        found["gelu", "fused"]["peak_bytes"]
        < 2 * found["gelu", "fused"]["peers"]["xla"]["peak_bytes"]
    )


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"kind": "mpl"}, "kind must be one of linear, gated, mlp, got kind='mpl'"),
        ({"kind": "gated", "rows": 1}, r"unknown keys \['rows'\]"),
    ],
)
def test_malformed_groups_of_fused_layers_are_refused(group, message):
    table = {"description": "", "workload": "fused", "dtypes": ["bf16"], "groups": [group]}
    with pytest.raises(ValueError, match=message):
        suites.parse_suite("x", table)


def test_grouped_products_are_measured_beside_xla():
    runner = harness.Harness(harness.Options(["auto"], [], repeats=3), Console(quiet=True))
    runner.run([suites.load_suite("smoke_moe")])
    assert not runner.wrong
    assert [r["label"] for r in runner.records] == ["forward", "lhs gradient", "rhs gradient"]
    assert all("xla" in r["peers"] for r in runner.records)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "backward"}, "kind must be one of forward, lhs_gradient, rhs_gradient"),
        ({"rows": 1}, r"unknown keys \['rows'\]"),
    ],
)
def test_malformed_groups_of_grouped_products_are_refused(change, message):
    group = {"tokens": 8, "groups": 2, "n": 8, "k": 8} | change
    table = {"description": "", "workload": "ragged", "dtypes": ["bf16"], "groups": [group]}
    with pytest.raises(ValueError, match=message):
        suites.parse_suite("x", table)


def test_clocks_are_read_under_load(monkeypatch):
    monkeypatch.setattr(records, "gpu_state", lambda: {"sm_mhz": 1980.0, "gpu": "x"})
    runner = harness.Harness(harness.Options(["xla"], [], timer="wall"), Console(quiet=True))
    runner._on_gpu = True
    runner.run([suites.Suite("test", "", (make_case(),))])
    machine = runner.records[0]["machine"]
    assert machine["sm_mhz_before"] == machine["sm_mhz_after"] == 1980
    assert "power_w_before" not in machine


def test_what_cannot_run_a_case_is_left_out_with_its_reason(capsys):
    options = harness.Options(["wmma_tiled", "xla"], [], repeats=5)
    if jax.default_backend() == "gpu":
        pytest.skip("wmma_tiled can run here")
    runner = harness.Harness(options, Console(width=200))
    runner.run([suites.Suite("test", "", (make_case(),))])
    assert [r["implementation"] for r in runner.records] == ["xla"]
    assert "wmma_tiled left out: dot_general: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("parse", "text"),
    [(contenders.parse_implementations, "nope"), (contenders.parse_peers, "xla,nope")],
)
def test_unknown_names_are_refused(parse, text):
    with pytest.raises(ValueError, match="got 'nope'"):
        parse(text)


def test_overhead_measures_one_call_and_a_chain():
    found = overhead.measure_overhead(samples=3, implementation="xla", revision="abc")
    assert [r["calls_per_step"] for r in found] == list(overhead.CHAINS)
    for record in found:
        assert record["us"]["p50"] > 0
        difference = record["us"]["p50"] - record["xla_us"]["p50"]
        assert record["overhead_us"] == pytest.approx(
            difference / record["calls_per_step"], abs=2e-3
        )


def test_a_parallel_layer_is_measured_and_rendered():
    record = parallel.measure(
        2, 16, 8, 32, dtype="float32", chunks=(2,), implementation="host", steps=1, samples=2
    )
    assert record["contenders"]["xla"]["error"] == 0
    assert 0 < record["contenders"]["collective/2"]["error"] < 1e-5
    us = {name: entry["us"]["p50"] for name, entry in record["contenders"].items()}
    ratio, overlap_ratio = parallel.ratios(record)["sharded"]
    assert ratio == us["xla"] / us["sharded"]
    assert overlap_ratio == us["xla_overlap"] / us["sharded"]
    section = render.summary_section([*make_records(), record])
    assert "| 2 | 16 tokens, 8 → 32 → 8, float32 | collective_scheduler_ce/2 |" in section


def test_gpu_state_reads_what_nvidia_smi_prints():
    state = records.parse_gpu_state("NVIDIA H200, 580.95.05, 1980, [N/A], 3201, 651.2, 700.00, 41")
    assert state["gpu"] == "NVIDIA H200"
    assert state["sm_mhz"] == 1980
    assert state["power_w"] == 651.2
    assert "sm_mhz_max" not in state


# Charts and documentation


def make_record(implementation="mma_sync", peer_us=10.0, us=20.0, **changes):
    record = {
        "schema": records.SCHEMA,
        "kind": "product",
        "time": "2026-01-01T00:00:00+00:00",
        "suite": "squares",
        "label": "",
        "batch": 1,
        "m": 512,
        "n": 512,
        "k": 512,
        "dtype": "bf16",
        "layout": "NN",
        "implementation": implementation,
        "us": {"p10": us, "p50": us, "p90": us},
        "peers": {"xla": {"us": {"p10": 1.0, "p50": peer_us, "p90": 99.0}, "error": 0.0}},
        "timer": "trace",
        "samples": 20,
        "machine": {"device": "NVIDIA H200", "driver": "580.1", "jax": "0.11.2"},
    } | changes
    flops = 2 * record["batch"] * record["m"] * record["n"] * record["k"]
    record["tflops"] = flops / us / 1e6
    record["ratio"] = peer_us / us
    return record


def make_records():
    squares = [
        make_record(name, m=size, n=size, k=size, us=us * size / 512)
        for size in (512, 1024, 2048)
        for name, us in (("mma_sync", 20.0), ("wgmma", 9.0))
    ]
    decode = [make_record(suite="decode", label="qkv", m=m, peer_us=12.0) for m in (1, 16)]
    return squares + decode


@pytest.fixture
def checkout(tmp_path):
    """A folder with the documents that are rendered, and records."""
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    for name in ("README.md", "benchmarks/README.md"):
        (tmp_path / name).write_text(f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n")
    records.append_records(tmp_path / "benchmarks/results/a.jsonl", make_records())
    return tmp_path


def test_render_writes_tables_and_charts_once(checkout):
    pytest.importorskip("matplotlib")
    stale = render.render(checkout, check=True)
    assert "old" in (checkout / "README.md").read_text()
    assert render.render(checkout) == stale
    assert {path.name for path in stale} == {"README.md", "squares.png", "decode.png"}
    assert render.render(checkout) == []
    text = (checkout / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "NVIDIA H200, driver 580.1, JAX 0.11.2" in text
    assert "| squares | bf16 | wgmma | 3 | 0.278 | 0.556 | 1.111 |" in text
    assert re.search(r"\| 1024³ \| 53.69 \| 119.3 \| 214.7 \| 0.250 \| 0.556 \|", text)
    assert "| 16×512×512 (qkv) |" in (checkout / "benchmarks/README.md").read_text()
    # New records, new charts: only those of their suite.
    records.append_records(
        checkout / "benchmarks/results/b.jsonl",
        [make_record(suite="decode", label="qkv", m=64)],
    )
    names = [path.name for path in render.render(checkout)]
    assert names == ["decode.png", "README.md", "README.md"]


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
    section = render.summary_section([*make_records(), *found])
    assert "| products a step |" in section
    assert render.summary_section(found) == render.summary_section([])


def test_committed_documents_show_the_committed_records():
    stale = render.render(REPOSITORY, check=True)
    assert stale == [], "run: python -m jax_tcgemm bench render"


@pytest.mark.parametrize("which", ["squares", "decode", "no_peers", "many_cases"])
def test_plots_show_something(which, tmp_path):
    pytest.importorskip("matplotlib")
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
