"""What `bench regret` draws, measures, writes and says."""

import io
import math

import jax.numpy as jnp
import pytest
from rich.console import Console
from typer.testing import CliRunner

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.bench import regret
from jax_tcgemm.bench.suites import Case
from jax_tcgemm.command.cli import app
from jax_tcgemm.selection import tables
from jax_tcgemm.selection.configs import WgmmaConfig
from jax_tcgemm.system import modules


def draw(m=16, n=24, k=32, *, batch=1, dtype="bf16", layout="NN", epilogue=""):
    return regret.Draw(Case("regret", "", batch, m, n, k, dtype, layout), epilogue)


def test_the_same_seed_draws_the_same_problems():
    drawn = regret.random_problems(200, 1)
    assert drawn[:50] == regret.random_problems(50, 1) != regret.random_problems(50, 2)
    cases = [d.case for d in drawn]
    for name in ("m", "n", "k"):
        extents = [getattr(case, name) for case in cases]
        assert min(extents) <= 2
        assert max(extents) > 20000
        # Half of the logarithms are below the middle of their range, but few of large products.
        assert 0.45 < sum(extent < 256 for extent in extents) / len(extents) < 0.8
        assert any(extent % 8 for extent in extents)
    assert max(case.batch for case in cases) > 100
    assert 0.4 < sum(case.batch == 1 for case in cases) / len(cases) < 0.8
    assert {case.layout for case in cases} == {"NN", "NT", "TN", "TT"}
    assert {case.dtype for case in cases} == {"bf16", "tf32"}
    assert {d.epilogue for d in drawn} == {"", *regret.EPILOGUES}


@pytest.mark.parametrize("epilogue", ["", *regret.EPILOGUES])
@pytest.mark.parametrize(("layout", "batch"), [("NN", 1), ("TT", 3)])
def test_every_way_computes_the_same(epilogue, layout, batch):
    d = draw(layout=layout, batch=batch, dtype="tf32", epilogue=epilogue)
    operands = [
        jnp.sin(jnp.arange(math.prod(x.shape), dtype=x.dtype) + i).reshape(x.shape)
        for i, x in enumerate(d.operands)
    ]
    a, b, *rest = operands
    a = a if layout[0] == "N" else a.swapaxes(-1, -2)
    b = b if layout[1] == "N" else b.swapaxes(-1, -2)
    expected = a @ b
    if epilogue:
        expected = expected + rest[0]
    if epilogue == "gelu":
        expected = (
            0.5 * expected * (1 + jnp.tanh(0.7978845608 * (expected + 0.044715 * expected**3)))
        )
    if epilogue == "residual":
        expected = expected + rest[1]
    for implementation in (None, "xla", regret.UNFUSED):
        got = d.function(implementation)(*operands)
        assert jnp.max(abs(got - expected)) < 1e-4, implementation


@pytest.mark.skipif(modules.cuda is None, reason="this build has no CUDA module")
def test_ways_beside_the_choice():
    bare = regret.ways(draw(512, 768, 1024), selection.ASSUMED_GPU)
    chosen, xla, *_ = bare.functions
    assert (chosen, xla) == (bare.chosen, "xla/default")
    counts = {
        name: sum(way.startswith(name) for way in bare.functions)
        for name in ("wgmma", "mma_sync", "cublaslt")
    }
    assert 8 <= counts["wgmma"] <= 12
    assert counts["mma_sync"] == 4
    # Of both orders of its operands, with and without split K.
    ways = [way.split("/") for way in bare.functions]
    wgmma = [WgmmaConfig.parse(config) for name, config in ways if name == "wgmma"]
    assert {(x.swap_ab, x.num_splits > 1) for x in wgmma} >= {(False, False), (True, True)}
    fused = regret.ways(draw(4096, 4096, 1024, epilogue="gelu"), selection.ASSUMED_GPU)
    assert fused.problem.function is not None
    assert list(fused.functions)[:3] == [fused.chosen, "xla/default", "unfused/xla"]
    assert sum(way.startswith("wgmma") for way in fused.functions) == 4
    # XLA's own kernel, which is faster where little is multiplied, takes the epilogue with it.
    small = draw(64, 2240, 64, dtype="tf32", layout="TN", epilogue="bias")
    apart = regret.ways(small, selection.ASSUMED_GPU)
    assert (
        list(apart.functions)[:2] == [apart.chosen, "xla/default"] == ["unfused/xla", "xla/default"]
    )


def outcome(times, chosen="wgmma/a", **what):
    return regret.Outcome(draw(**what), chosen, times)


def test_the_best_is_of_those_with_as_many_turns():
    times = {"wgmma/a": (4.0, 15), "xla/default": (3.0, 15), "wgmma/b": (2.0, 5)}
    assert regret.best(outcome(times)) == "xla/default"
    assert regret.ratio(outcome(times)) == 0.75
    assert regret.ratio(outcome(times), "wgmma/a") == 1
    assert math.isnan(regret.ratio(outcome(times), "wgmma/c"))
    assert math.isnan(regret.ratio(outcome(times, chosen="wgmma/c")))


def test_the_summary():
    good = {"wgmma/a": (2.0, 15), "xla/default": (4.0, 15)}
    bad = {"wgmma/a": (4.0, 15), "xla/default": (1.0, 15)}
    found = [outcome(good), outcome(bad, m=17), outcome(good, chosen="wgmma/c")]
    table, text = regret.summary(found)
    assert "2 problems; best / chosen: geomean 0.5000, 5th percentile 0.287" in text
    assert "XLA / chosen: geomean 0.7071" in text
    assert text.endswith("1 choices did not run")
    out = io.StringIO()
    Console(width=120, file=out).print(table)
    assert out.getvalue().index("17×24×32") < out.getvalue().index("16×24×32")
    assert regret.summary(found[2:])[1] == "regret: none of the 1 choices ran"


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "regret.csv"
    assert regret.read(path) == []
    times = {"wgmma/a_split2": (4.0, 15), "xla/default": (3.25, 5)}
    found = [
        outcome(times, "wgmma/a_split2", batch=3, layout="TN", dtype="tf32", epilogue="gelu"),
        outcome(times, "xla/default"),
    ]
    for one in found:
        regret.append(path, one)
    assert regret.read(path) == found
    assert path.read_text().startswith("# python -m jax_tcgemm bench regret on ")


def measured(draws, **options):
    return list(regret.measure(draws, selection.target_device("cpu"), budget_s=0.05, **options))


def test_what_fails_is_left_out(monkeypatch):
    def ways(d, device):
        def raises(*operands):
            raise ValueError("no way")

        if d.case.m == 7:
            raises()
        functions = {"xla/default": d.function("xla"), "host/raises": raises}
        return regret.Ways("xla/default", functions, None)

    monkeypatch.setattr(regret, "ways", ways)
    with pytest.warns(UserWarning, match="7×24×32 NN bf16 is left out: no way"):
        (one,) = measured([draw(m=7), draw()])
    assert one.draw == draw()
    (us, turns) = one.times.pop("xla/default")
    assert not one.times
    assert us > 0
    assert turns >= 1


def test_no_problems_are_begun_after_the_limit(monkeypatch):
    monkeypatch.setattr(regret, "_TOGETHER", 1)
    assert len(measured([draw(), draw(m=17)], limit_s=1e-9)) == 1
    assert len(measured([draw(), draw(m=17)], limit_s=100)) == 2


def test_no_table_is_asked_for_what_is_chosen():
    d = draw(512, 512, 512, dtype="tf32")
    device = selection.target_device("cpu")
    (call,) = jax_tcgemm.explain(d.function(None), *d.operands)
    chosen = f"{call.implementation}/{call.config}"
    other = ("host", "auto") if call.implementation == "xla" else ("xla", "default")
    entry = tables.make_entry(*other, 1.0, selection.abi_of(other[0]))
    known = {tables.problem_key(call.problem): entry}
    tables.adopt(tables.Table(device.key, known, "a test"), "a test")
    try:
        assert regret.ways(d, device).chosen == "/".join(other)
        (one,) = measured([d])
        assert one.chosen == chosen
        assert regret.ways(d, device).chosen == "/".join(other)
    finally:
        tables.reset()


def run(*arguments):
    result = CliRunner().invoke(app, ["bench", "regret", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_command_measures_what_its_file_has_not(tmp_path):
    path = tmp_path / "regret.csv"
    few = "--scale", 0.3, "--budget", 0.05, "--seed", 3, "--out", path
    code, text = run("--problems", 3, *few)
    assert code == 0, text
    assert "3 problems; best / chosen: geomean" in text
    before = path.read_text()
    assert [one.draw for one in regret.read(path)] == regret.random_problems(3, 3, 0.3)
    code, text = run("--problems", 4, *few)
    assert "4 problems; best / chosen: geomean" in text
    after = path.read_text()
    assert after.startswith(before)
    assert len(regret.read(path)) == 4
    code, text = run("--budget", -1)
    assert code == 1
    assert "budget must be a positive, finite number" in text
