"""The benchmark's harness on whatever device this is: what it measures, records and refuses."""

import dataclasses
import json

import jax
import pytest
from bench_cases import draw_by_numpy, make_case, make_record, make_records, make_workload
from jax import lax
from rich.console import Console

from jax_tcgemm.bench import (
    contenders,
    decode,
    harness,
    highlights,
    parallel,
    records,
    reference,
    render,
    suites,
)
from jax_tcgemm.bench.workloads import functions
from jax_tcgemm.tuning import timing


@pytest.fixture(autouse=True, scope="module")
def quick_inputs():
    """Two sets of inputs, where as many as fill caches would be drawn for nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "num_input_sets", lambda *_: 2)
        draw_by_numpy(patch)
        yield


def measure(cases, names=("auto",), peers=(), *, out=None, console=None, **options):
    """A harness that has measured cases."""
    given = harness.Options(names, peers, **{"repeats": 5} | options)
    runner = harness.Harness(given, console or Console(quiet=True), out)
    runner.run([suites.Suite("test", "", tuple(cases))])
    return runner


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The smoke suite, measured: the harness and the file it wrote."""
    out = tmp_path_factory.mktemp("bench") / "records.jsonl"
    peers = contenders.parse_peers("xla,cublaslt")
    cases = suites.load_suite("smoke").cases
    return measure(cases, ["auto", "xla"], peers, out=out, repeats=6, revision="abc"), out


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
        assert record["peers"][name]["us"]["p50"] == us
        assert record["ratio"] == min(peer["ratio"] for peer in record["peers"].values())
    assert all("xla" not in r["peers"] for r in found if r["implementation"] == "xla")


def test_wrong_results_are_never_recorded(monkeypatch):
    case = make_case()

    def product(a, b):
        return lax.dot_general(a, b, case.dimension_numbers).at[0, 0].add(1000)

    wrong = contenders.Contender(
        "bad", "xla", True, "xla", None, "", "", "jit_bad", jax.jit(product)
    )
    monkeypatch.setattr(harness, "plan", lambda *_: ([wrong], {}))
    runner = measure([case])
    assert runner.records == []
    assert "bad on 24×40×56: error" in runner.wrong[0]


def test_a_failure_is_told_and_the_other_cases_are_measured(monkeypatch):
    real = reference.make_inputs

    def make_inputs(case, num_sets):
        if case.m == 24:
            raise MemoryError("no room\nfor this")
        return real(case, num_sets)

    monkeypatch.setattr(reference, "make_inputs", make_inputs)
    runner = measure([make_case(), make_case(m=25)], ["xla"])
    assert [r["m"] for r in runner.records] == [25]
    assert runner.wrong == ["the case failed on 24×40×56: no room"]


def test_workloads_are_recorded_beside_their_peers(tmp_path):
    workload = make_workload()
    assert workload.bytes == 2 * (8 * 16 + 16 * 12 + 2 * 8 * 12) + 1
    out = tmp_path / "records.jsonl"
    runner = measure([workload], out=out)
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


def test_a_ratio_compares_calls_of_the_same_turn(monkeypatch):
    # The clock halves after two turns, which medians of the calls cannot tell from a difference.
    us = {"ours": (10.0, 10.0, 20.0, 20.0, 20.0), "jnp": (11.0, 11.0, 22.0), "nn": (30.0,) * 5}
    timings = {name: timing.Timing(calls, "wall") for name, calls in us.items()}
    monkeypatch.setattr(timing, "measure", lambda *_, **__: timings)
    (record,) = measure([make_workload()]).records
    assert record["us"]["p50"] == 20.0
    assert record["peers"]["jnp"]["us"]["p50"] == 11.0
    assert record["peers"]["jnp"]["ratio"] == pytest.approx(1.1)
    assert record["peers"]["nn"]["ratio"] == pytest.approx(1.5)
    assert record["ratio"] == record["peers"]["jnp"]["ratio"]


def test_a_wrong_array_of_several_is_found():
    def wrong(x, w, shift):
        return lax.dot(x, w) + shift.astype(x.dtype), lax.dot(x, w).T.at[3, 2].add(9)

    workload = make_workload(peers={"wrong": wrong})
    runner = measure([workload])
    assert [r["peers"] for r in runner.records] == [{}]
    assert "wrong on 8×12×16: error" in runner.wrong[0]


def test_fused_layers_are_measured_beside_the_expressions():
    runner = measure(suites.load_suite("smoke_fused").cases)
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


def test_functions_are_measured_beside_the_product_alone():
    runner = measure(suites.load_suite("smoke_functions").cases)
    assert not runner.wrong
    found = {(r["label"], r["implementation"]) for r in runner.records}
    assert found == {(name, how) for name in functions.FUNCTIONS for how in ("auto", "bare")}
    for record in runner.records:
        assert record["parts"].keys() == {"product"}
        assert record["parts"]["product"]["ratio"] > 0
        assert record["peers"].keys() == {"xla"}
        # The product alone computes something else, and nothing is compared with it.
        assert record["ratio"] == record["peers"]["xla"]["ratio"]
    section = render.full_section([make_record(), *runner.records])
    assert "auto : product | bare : product |" in section


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax.nn.scaled_matmul of this JAX runs on GPUs alone"
)
def test_scaled_products_are_measured_beside_those_of_xla():
    runner = measure(suites.load_suite("smoke_scaled").cases)
    assert not runner.wrong
    labels = [record["label"] for record in runner.records]
    assert labels == ["rows", "blocks", "mxfp8", "nvfp4"]
    for record in runner.records:
        of_jax = {"nn"} if record["label"] in ("mxfp8", "nvfp4") else set()
        assert set(record["peers"]) == {"xla"} | of_jax
        assert record["error"] < 2**-6


def test_grouped_scaled_products_are_measured_beside_those_of_xla():
    runner = measure(suites.load_suite("smoke_moe_fp8").cases)
    assert not runner.wrong
    labels = [record["label"] for record in runner.records]
    kinds = "", "gated ", "weights "
    assert labels == [f"{kind}{scaling}" for kind in kinds for scaling in ("rows", "blocks")]
    for record in runner.records:
        assert set(record["peers"]) == {"xla"}
        steps = {"steps"} if record["label"].startswith("gated") else set()
        assert record["parts"].keys() == {"bf16"} | steps
        assert record["error"] < 2**-6


def test_experts_in_8_bits_are_measured_beside_those_in_16():
    runner = measure(suites.load_suite("smoke_experts_fp8").cases)
    assert not runner.wrong
    assert [record["implementation"] for record in runner.records] == ["current", "block128"]
    for record in runner.records:
        assert record["peers"].keys() == {"layers", "xla"}
        assert 0 < record["peers"]["xla"]["error"] < record["error"] < 0.1


def test_losses_are_measured_beside_whole_logits_and_chunks():
    runner = measure(suites.load_suite("smoke_losses").cases)
    assert not runner.wrong
    assert [record["implementation"] for record in runner.records] == ["fused", "recompute"]
    for record in runner.records:
        assert record["peers"].keys() == {"logits", "chunks"}
        assert record["parts"].keys() == {"forward", "logits_forward"}
        for used in (record, *record["peers"].values(), *record["parts"].values()):
            assert 0 < used["temp_bytes"] < used["peak_bytes"]


def test_a_case_may_give_contenders_more_time_than_is_asked_for(capsys):
    (case,) = suites.load_suite("smoke_losses").cases
    long = dataclasses.replace(case, label="long", budget_s=60.0)
    runner = measure([case, long], budget_s=1e-9, console=Console())
    assert "fused left out: a call takes" in " ".join(capsys.readouterr().out.split())
    assert [record["label"] for record in runner.records] == ["long", "long"]
    assert [record["samples"] for record in runner.records] == [5, 5]


def test_whole_logits_that_fit_nowhere_are_left_out():
    *rest, long = suites.load_suite("losses").cases
    assert all(case.peers.keys() == {"logits", "chunks"} for case in rest)
    assert long.peers.keys() == {"chunks"}
    assert long.parts.keys() == {"forward"}
    assert [case.budget_s for case in (*rest, long)] == [0, 0, 0, 5]


@pytest.mark.parametrize(
    ("suite", "of_16_bits", "of_8_bits"), [("smoke_packed", 14, 2), ("smoke_packed_grouped", 12, 0)]
)
def test_packed_weights_are_measured_beside_xla_and_plain_products(suite, of_16_bits, of_8_bits):
    runner = measure(suites.load_suite(suite).cases)
    assert not runner.wrong
    quantized = [record for record in runner.records if "x of 8 bits" in record["shape"]]
    assert len(runner.records) - len(quantized) == of_16_bits
    assert len(quantized) == of_8_bits
    for record in runner.records:
        assert record["implementation"] == "auto"
        peers = {"xla", "plain"} | ({"packed"} if record in quantized else set())
        assert record["peers"].keys() == peers


def test_quantizers_are_measured_beside_xla_and_a_copy():
    runner = measure(suites.load_suite("smoke_quantize").cases)
    assert not runner.wrong
    assert len(runner.records) == 6
    for record in runner.records:
        assert record["implementation"] == "quantize"
        assert record["peers"].keys() == {"xla"}
        assert record["parts"].keys() == {"copy"}


def test_grouped_products_are_measured_beside_xla():
    runner = measure(suites.load_suite("smoke_moe").cases)
    assert not runner.wrong
    assert [r["label"] for r in runner.records] == [
        *("gated", "gathered gated", "combine", "forward", "lhs gradient", "rhs gradient"),
    ]
    assert all("xla" in r["peers"] for r in runner.records)


def test_without_device_time_a_case_is_timed_by_the_clock(monkeypatch, capsys):
    asked, real = [], timing.measure

    def measured(*given, timer, **options):
        asked.append(timer)
        if timer == "trace":
            raise timing.TraceError("the trace is empty")
        return real(*given, timer=timer, **options)

    monkeypatch.setattr(timing, "measure", measured)
    runner = measure([make_case()], timer="trace", console=Console())
    assert asked == ["trace", "trace", "chained"]  # one trace may be lost
    assert [r["timer"] for r in runner.records] == ["chained"]
    assert "no device time: the trace is empty" in " ".join(capsys.readouterr().out.split())


def test_clocks_are_read_under_load(monkeypatch):
    monkeypatch.setattr(records, "gpu_state", lambda: {"sm_mhz": 1980.0, "gpu": "x"})
    runner = harness.Harness(harness.Options(["xla"], [], timer="wall"), Console(quiet=True))
    runner._on_gpu = True
    runner.run([suites.Suite("test", "", (make_case(),))])
    machine = runner.records[0]["machine"]
    assert machine["sm_mhz_before"] == machine["sm_mhz_after"] == 1980
    assert "power_w_before" not in machine


def test_what_cannot_run_a_case_is_left_out_with_its_reason(capsys):
    # In f32 there is nothing for tensor cores to multiply.
    runner = measure([make_case()], ["wmma_tiled", "xla"], console=Console(width=200))
    assert [r["implementation"] for r in runner.records] == ["xla"]
    assert "wmma_tiled left out: dot_general: " in capsys.readouterr().out


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
    section = render.full_section([*make_records(), record])
    assert "| 2 | 16 tokens, 8 → 32 → 8, float32 | collective_scheduler_ce/2 |" in section


def test_decode_steps_are_measured_and_rendered():
    found = decode.measure(2, (1, 3), 16, 32, layers=2, steps=1, samples=2)
    assert [record["rows"] for record in found] == [1, 3]
    us = decode.times(found[1])
    assert set(us) == {"psum", "all_reduce", "alone"}
    bar = highlights.Decode("decode", 2, most_rows=2)
    ((ratio, record),) = bar.ratios([*found, found[0] | {"devices": 4}])
    assert record is found[0]
    assert ratio == decode.times(record)["psum"] / decode.times(record)["all_reduce"]
    section = render.full_section([*make_records(), *found])
    assert f"| 2 | 16 → 32 → 16 | 3 | 0.09375 | {us['psum']:.1f} |" in section
    with pytest.raises(ValueError, match="devices must be from 2 to"):
        decode.measure(3, (1,), 16, 32)


def test_gpu_state_reads_what_nvidia_smi_prints():
    state = records.parse_gpu_state("NVIDIA H200, 580.95.05, 1980, [N/A], 3201, 651.2, 700.00, 41")
    assert state["gpu"] == "NVIDIA H200"
    assert state["sm_mhz"] == 1980
    assert state["power_w"] == 651.2
    assert "sm_mhz_max" not in state
