"""The benchmark's timers: traces, the wall clock, and what a call costs the host."""

import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_cases import make_case

import jax_tcgemm
from jax_tcgemm.bench import contenders, overhead, programs, reference
from jax_tcgemm.tuning import timing


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
    found = timing.measure([contender("x"), contender("y")], sets, [10, 8], timer=timer)
    assert [len(found[name].us) for name in "xy"] == [10, 8]
    assert all(us > 0 for us in found["x"].us)
    if timer == "wall":
        jax.effects_barrier()
        turns = ["".join(calls[i : i + 2]) for i in range(0, 16, 2)]
        assert set(turns) == {"xy", "yx"}  # so that neither always follows the other
        assert calls[16:] == ["x", "x"]


@pytest.mark.parametrize(("lead_s", "uncounted"), [(0.0, 3), (0.1, 50), (5.0, 500)])
def test_calls_of_a_trace_count_after_the_lead(monkeypatch, lead_s, uncounted):
    # A call takes a millisecond, a turn two; in the trace, the n-th call of a module took n.
    clock, folders, calls, before = [0], [], [], []
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: clock[0] / 1000))

    def start_trace(folder, profiler_options):
        folders.append(pathlib.Path(folder))
        before.extend(calls)
        calls.clear()

    def stop_trace():
        (folders[0] / "x.xplane.pb").write_bytes(b"")

    def activities(data):
        of_one = {name: 1e3 * np.arange(calls.count(name)) for name in "xy"}
        return [(f"jit_{x}", 1e9 * us, us) for x, found in of_one.items() for us in found.tolist()]

    monkeypatch.setattr(jax.profiler, "start_trace", start_trace)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop_trace)
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda path: None)
    monkeypatch.setattr(timing, "_activities", activities)

    def contender(name):
        def function(x):
            calls.append(name)
            clock[0] += 1
            return x

        return timing.Runnable(name, f"jit_{name}", function)

    found = timing.measure(
        [contender("x"), contender("y")], [(jnp.ones(1),)], [10, 8], timer="trace", lead_s=lead_s
    )
    assert len(before) == (2 if lead_s else 0)  # a turn tells how many the lead takes
    for name, repeats in (("x", 10), ("y", 8)):
        assert calls.count(name) == uncounted + repeats
        assert found[name].us == tuple(range(uncounted, uncounted + repeats))


def test_groups_are_measured_on_inputs_of_their_own_and_fail_alone():
    def fails():
        raise RuntimeError("out of memory")

    def group(name, make_sets, repeats):
        contender = timing.Runnable(name, f"jit_{name}", jax.jit(lambda a: a + 1))
        return timing.Group([contender], make_sets, [repeats])

    groups = [group(x, lambda x=x: [(jnp.ones(x),)], x) for x in (1, 2)]
    groups.insert(1, group(3, fails, 3))
    one, failed, two = timing.measure_groups(groups, timer="wall")
    assert len(one[1].us) == 1
    assert len(two[2].us) == 2
    assert str(failed) == "out of memory"


def test_what_a_trace_has_lost_of_one_group_leaves_the_others(monkeypatch):
    def activities(data):
        # The n-th call took n us; of y, one of the calls is not there.
        of_one = {"x": range(8), "y": range(4)}
        return [(f"jit_{x}", 1e9 * n, 1e3 * n) for x, found in of_one.items() for n in found]

    def start_trace(folder, profiler_options):
        pathlib.Path(folder, "x.xplane.pb").write_bytes(b"")

    monkeypatch.setattr(jax.profiler, "start_trace", start_trace)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda path: None)
    monkeypatch.setattr(timing, "_activities", activities)
    groups = [
        timing.Group([timing.Runnable(x, f"jit_{x}", lambda a: a)], lambda: [(jnp.ones(1),)], [n])
        for x, n in (("x", 5), ("y", 2))
    ]
    whole, lost = timing.measure_groups(groups, timer="trace")
    assert whole["x"].us == (3, 4, 5, 6, 7)  # after three that do not count
    assert isinstance(lost, timing.TraceError)
    assert "4 activities of jit_y for 5 calls" in str(lost)


@pytest.mark.gpu
def test_groups_of_a_trace_on_a_gpu(gpu):
    def group(name, size):
        def function(a):
            return a @ a

        function.__name__ = function.__qualname__ = name
        contender = timing.Runnable(name, f"jit_{name}", jax.jit(function))
        return timing.Group([contender], lambda: [(jnp.ones((size, size)),)] * 2, [5], 1 << 27)

    small, large = timing.measure_groups([group("a", 256), group("b", 4096)], timer="trace")
    assert len(small["a"].us) == len(large["b"].us) == 5
    assert large["b"].percentile(50) > 4 * small["a"].percentile(50)


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


def test_overhead_measures_one_call_and_a_chain():
    found = overhead.measure_overhead(samples=3, implementation="xla", revision="abc")
    assert [r["calls_per_step"] for r in found] == list(overhead.CHAINS)
    for record in found:
        assert record["us"]["p50"] > 0
        difference = record["us"]["p50"] - record["xla_us"]["p50"]
        assert record["overhead_us"] == pytest.approx(
            difference / record["calls_per_step"], abs=2e-3
        )


def test_programs_are_measured_in_loops(cpu_rule):
    """By the rule, XLA makes of a small model under `patch` what it makes of plain JAX."""
    model = next(p for p in programs.models() if p.label == "tanh(w @ h), width 8")
    found = programs.measure(model, 2, "abc")
    assert (found["kind"], found["group"], found["revision"]) == ("program", "models", "abc")
    assert (found["ran"], found["identical"], found["error"]) == ({"xla": 1}, True, 0)
    assert found["us"]["p50"] > 0 < found["plain_us"]["p50"]


def test_products_are_measured_in_loops():
    case = make_case(dtype="c64", layout="TN", batch=3)
    (product,) = programs.products([case], "host")
    found = programs.measure(product, 2, "abc")
    assert (found["label"], found["dtype"]) == ("3×24×40×56 TN", "c64")
    assert (found["ran"], found["identical"]) == ({"host": 1}, False)
    assert 0 < found["error"] < 1e-5


def test_a_program_that_ends_elsewhere_is_not_measured():
    one = jnp.ones(4)
    wrong = programs.Program("models", "wrong", lambda x: (x,), lambda x: (x + 0.1,), (one,))
    with pytest.raises(ValueError, match="wrong must end as plain JAX does"):
        programs.measure(wrong, 2)


@pytest.mark.parametrize("name", ["hessian", "mixture of 4 experts", "vmap of 16 nets"])
def test_small_models_end_as_plain_jax_does(name):
    """With our calls in them: outside of tests the rule leaves most of such products to XLA."""
    model = next(p for p in programs.models() if p.label.startswith(name))
    calls = jax_tcgemm.explain(model.ours, *model.carry)
    assert "host" in {call.implementation for call in calls}
    ours, plain = (jax.jit(step)(*model.carry) for step in (model.ours, model.plain))
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
