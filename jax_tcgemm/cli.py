"""The command line: ``python -m jax_tcgemm info | demo | bench | tune | fragment``."""

import contextlib
import math
import pathlib
from collections.abc import Iterator
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import jax_tcgemm

app = typer.Typer(
    help="Tensor-core matrix multiplications for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(
    help="Measure products beside XLA and cuBLASLt.", invoke_without_command=True
)
app.add_typer(bench_app, name="bench")

# Options that several measurements have.
_Records = Annotated[
    pathlib.Path | None, typer.Option(help="Append records to this JSON-lines file.")
]
_Revision = Annotated[
    str | None, typer.Option(help="Source revision to record, where git cannot tell.")
]
_Forced = Annotated[
    str | None, typer.Option(help="Force one implementation; our choice by default.")
]


@contextlib.contextmanager
def _errors_as_text() -> Iterator[None]:
    """Ends the command with the message of an error the user can act on, and no traceback."""
    try:
        yield
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(1) from error


def _console() -> Console:
    """The standard output; wide enough for every table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=150)


@app.command()
def info() -> None:
    """Show versions, GPUs, and which implementations can run here and why the others cannot."""
    _console().print(jax_tcgemm.info())


@app.command()
def demo(
    implementation: Annotated[
        str | None, typer.Option(help="Force one implementation for every product.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 600,
) -> None:
    """Train a network on handwritten digits, beside the same network with jnp.matmul."""
    with _errors_as_text():
        from jax_tcgemm.demo import run_demo

        run_demo(steps, implementation, _console())


@app.command()
def fragment(
    shape: Annotated[str, typer.Argument(help="Instruction shape, such as m16n16k16 or m16n8k16.")],
    dtype: Annotated[str, typer.Argument(help="Element type, such as f16.")],
    operand: Annotated[str, typer.Argument(help="a, b or c.")],
) -> None:
    """Show which lane and element of a fragment hold which matrix element."""
    with _errors_as_text():
        from jax_tcgemm.fragments import fragment_grid

        # Plain, because a grid must not be wrapped to the terminal.
        typer.echo(fragment_grid(shape, dtype, operand))


@app.command()
def tune(
    suite: Annotated[str | None, typer.Option(help="Suites of bench, comma-separated.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="M,N,K or BATCH,M,N,K; may be repeated.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help="Layouts of --shape, comma-separated: NN, NT, TN, TT.")
    ] = "NN",
    dtype: Annotated[
        str | None, typer.Option(help="Dtypes, comma-separated; default bf16, or the suite's own.")
    ] = None,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(help="Write the table to this file, not to the user's cache folder."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Keep what --out holds about other problems.")
    ] = False,
    provenance: Annotated[
        str, typer.Option(help="A line for the table on where its figures come from.")
    ] = "python -m jax_tcgemm tune",
    regret: Annotated[
        int | None,
        typer.Option(min=1, help="Measure the regret of the choice on so many random problems."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random problems.")] = 0,
    scale: Annotated[
        float, typer.Option(min=0.001, help="Of the random extents; below 1 for slow machines.")
    ] = 1.0,
    budget: Annotated[
        float | None,
        typer.Option(min=0.01, help="Seconds for a problem: 5; 2.5 with --regret."),
    ] = None,
    configs: Annotated[
        int | None,
        typer.Option(min=1, help="Configs to measure for a problem: 20; 30 with --regret."),
    ] = None,
    xla: Annotated[bool, typer.Option(help="Let XLA's own dot take part, too.")] = True,
) -> None:
    """Measure what runs each problem fastest, and remember it; or how good the choice is."""
    console = _console()
    with _errors_as_text():
        if (regret is not None) + bool(suite or shape) != 1:
            raise ValueError(
                "tune: problems must come from --suite and --shape, or from --regret alone, got "
                f"{suite=}, {shape=}, {regret=}; bench --list shows the suites"
            )
        if regret is None:
            _tune(
                console, suite, shape, layout, dtype, out, merge, provenance, budget, configs, xla
            )
        else:
            _regret(console, regret, seed, dtype or "bf16", scale, budget, configs)


def _tune(console, suite, shape, layout, dtype, out, merge, provenance, budget, configs, xla):
    """Tunes suites and shapes, and writes the table."""
    import dataclasses

    from jax_tcgemm import tuning
    from jax_tcgemm.autotune import BUDGET_S, CANDIDATES, Tuning, tune_problems

    device = _default_device()
    found = tune_problems(
        _problems(suite, shape, layout, dtype),
        device,
        budget_s=budget or BUDGET_S,
        candidates=configs or CANDIDATES,
        xla=xla,
    )
    result = Tuning(device, found)
    console.print(result)
    if not found:
        raise ValueError(
            "tune: a problem must be one that can be measured here, got none; "
            "see python -m jax_tcgemm info"
        )
    table = dataclasses.replace(result.table, provenance=provenance)
    if out is None:
        path = tuning.save_to_cache(table)
    else:
        (tuning.merge_table if merge else tuning.write_table)(out, table)
        path = out
    console.print(f"wrote {path}" if path else "[yellow]nothing was written[/]", soft_wrap=True)


def _problems(suite, shape, layout, dtype) -> list:
    """The distinct problems that suites and shapes come to."""
    import jax

    from jax_tcgemm.bench import contenders, suites

    dtypes = dtype.split(",") if dtype else None
    cases = [
        case
        for name in (suite.split(",") if suite else ())
        for case in suites.load_suite(name, dtypes).cases
    ]
    for text in shape or ():
        extents = text.split(",")
        if len(extents) not in (3, 4) or not all(extent.isdecimal() for extent in extents):
            raise ValueError(
                f"tune: shape must be M,N,K or BATCH,M,N,K, got shape={text!r}; "
                "repeat --shape for several"
            )
        *batch, m, n, k = map(int, extents)
        group = {"m": m, "n": n, "k": k, "batch": batch or 1, "layout": layout.split(",")}
        described = {"description": "", "dtypes": ["bf16"], "groups": [group]}
        cases += suites.parse_suite("--shape", described, dtypes).cases
    found = {}
    with jax.enable_x64(True):  # Cases say their own types.
        for case in cases:
            for contender in contenders.plan(case, ["auto"], [], None)[0]:
                for call in jax_tcgemm.explain(contender.function, *case.operands):
                    if call.problem is not None:
                        found[call.problem] = None
    return list(found)


def _default_device():
    import jax

    from jax_tcgemm import selection

    platform = jax.default_backend()
    return selection.target_device("cuda" if platform == "gpu" else platform)


def _regret(console, count, seed, dtype, scale, budget, configs):
    """Measures random problems and tells how good the choices are."""
    from jax_tcgemm.autotune import tune_problems
    from jax_tcgemm.bench.regret import random_problems, regret_table

    found = tune_problems(
        random_problems(count, seed, dtype, scale),
        _default_device(),
        budget_s=budget or 2.5,
        candidates=configs or 30,
        xla=False,
    )
    table, summary = regret_table(found)
    console.print(table)
    console.print(summary, highlight=False, soft_wrap=True)


@bench_app.callback()
def bench(
    context: typer.Context,
    suite: Annotated[str | None, typer.Option(help="Suites, comma-separated; see --list.")] = None,
    impl: Annotated[
        str, typer.Option(help="Implementations, comma-separated; auto: our choice; all: each.")
    ] = "auto",
    peers: Annotated[str, typer.Option(help="Peers to run in turns with ours.")] = "xla,cublaslt",
    dtype: Annotated[
        str | None, typer.Option(help="Measure these dtypes instead of the suite's own.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Configs to force, comma-separated; all: each.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Calls of each contender.")] = 20,
    budget: Annotated[float, typer.Option(help="Seconds for one contender on one shape.")] = 2.0,
    jobs: Annotated[
        int, typer.Option(min=0, help="Programs compiled at once; 0: as suits the machine.")
    ] = 0,
    timer: Annotated[
        str, typer.Option(help="auto, trace (device time), chained or wall (wall clock).")
    ] = "auto",
    out: _Records = None,
    plot: Annotated[pathlib.Path | None, typer.Option(help="Draw a chart, as a PNG.")] = None,
    revision: _Revision = None,
    list_suites: Annotated[bool, typer.Option("--list", help="List the suites.")] = False,
) -> None:
    """Measure suites of products beside XLA and cuBLASLt, and record what was measured."""
    if context.invoked_subcommand is not None:
        return
    console = _console()
    with _errors_as_text():
        from jax_tcgemm.bench import contenders, harness, suites, timing

        if list_suites:
            _print_suites(console)
            return
        if suite is None:
            raise ValueError(
                "bench: suite must be given, got suite=None; --list shows what there is"
            )
        if timer not in ("auto", *timing.TIMERS):
            raise ValueError(
                f"bench: timer must be auto, {', '.join(timing.TIMERS)}, got timer={timer!r}; "
                "auto takes the best one there is"
            )
        dtypes = dtype.split(",") if dtype else None
        chosen = [suites.load_suite(name, dtypes) for name in suite.split(",")]
        options = harness.Options(
            implementations=contenders.parse_implementations(impl),
            peers=contenders.parse_peers(peers),
            configs=config,
            repeats=repeats,
            budget_s=budget,
            jobs=jobs,
            timer=timer,
            revision=revision,
        )
        runner = harness.Harness(options, console, out)
        runner.run(chosen)
        _print_records(console, runner.records)
        if plot is not None and runner.records:
            from jax_tcgemm.bench.plot import plot as draw

            draw(runner.records, plot)
    for text in runner.wrong:
        console.print(f"[red]wrong:[/] {escape(text)}", highlight=False)
    if runner.wrong or not runner.records:
        raise typer.Exit(1)


@bench_app.command()
def overhead(
    impl: _Forced = None,
    samples: Annotated[int, typer.Option(min=2, help="Measurements of each step.")] = 100,
    out: _Records = None,
    revision: _Revision = None,
) -> None:
    """Measure what one of our calls costs the host, beside lax.dot_general."""
    from jax_tcgemm.bench import records as rec
    from jax_tcgemm.bench.overhead import measure_overhead

    console = _console()
    with _errors_as_text(), console.status("measuring"):
        found = measure_overhead(samples, impl, revision)
    table = Table("products a step", "jax_tcgemm, µs", "lax.dot_general, µs", "difference a call")
    for record in found:
        table.add_row(
            str(record["calls_per_step"]),
            f"{record['us']['p50']:.2f}",
            f"{record['xla_us']['p50']:.2f}",
            f"{record['overhead_us']:+.2f} µs",
        )
    console.print(table)
    if out is not None:
        rec.append_records(out, found)


@bench_app.command()
def parallel(
    devices: Annotated[str, typer.Option(help="Numbers of devices, comma-separated.")] = "2,4",
    tokens: Annotated[int, typer.Option(min=1, help="Rows of the layer's input.")] = 8192,
    model: Annotated[int, typer.Option(min=1, help="Its columns.")] = 8192,
    hidden: Annotated[int, typer.Option(min=1, help="Columns of the hidden layer.")] = 28672,
    dtype: Annotated[str, typer.Option(help="Dtype of all arrays.")] = "bfloat16",
    chunks: Annotated[
        str, typer.Option(help="Pieces in which shards are moved, comma-separated.")
    ] = "1",
    impl: _Forced = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps in flight in one sample.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each contender.")] = 10,
    out: _Records = None,
    revision: _Revision = None,
) -> None:
    """Measure a tensor-parallel MLP, forward and backward, beside XLA's."""
    from jax_tcgemm.bench import parallel as module
    from jax_tcgemm.bench import records as rec

    console = _console()
    for count in map(int, devices.split(",")):
        with _errors_as_text(), console.status(f"measuring on {count} devices"):
            record = module.measure(
                count,
                tokens,
                model,
                hidden,
                dtype=dtype,
                chunks=tuple(map(int, chunks.split(","))),
                implementation=impl,
                steps=steps,
                samples=samples,
                revision=revision,
            )
        title = f"{count} devices, {tokens} tokens, {model} -> {hidden} -> {model}, {dtype}"
        table = Table(
            "", "ms a step", "TFLOP/s a device", "xla / it", "xla_overlap / it", title=title
        )
        ratios = module.ratios(record)
        for name, entry in record["contenders"].items():
            against = [f"{ratio:.3f}" for ratio in ratios.get(name, ())]
            ms = f"{entry['us']['p50'] / 1e3:.3f}"
            table.add_row(name, ms, str(entry["tflops"]), *against)
        console.print(table)
        if out is not None:
            rec.append_records(out, [record])


@bench_app.command()
def render(
    root: Annotated[pathlib.Path, typer.Option(help="The checkout.")] = pathlib.Path(),
    check: Annotated[bool, typer.Option("--check", help="Only tell what is out of date.")] = False,
) -> None:
    """Bring the tables and charts of the documentation up to date with benchmarks/results."""
    with _errors_as_text():
        from jax_tcgemm.bench.render import render as render_files

        changed = render_files(root, check)
    for path in changed:
        typer.echo(f"{'out of date' if check else 'wrote'}: {path}")
    if check and changed:
        raise typer.Exit(1)


def _print_suites(console: Console) -> None:
    from jax_tcgemm.bench import suites

    table = Table("suite", "cases", "dtypes", "what")
    for name in suites.suite_names():
        found = suites.load_suite(name)
        dtypes = ", ".join(dict.fromkeys(case.dtype for case in found.cases))
        table.add_row(name, str(len(found.cases)), dtypes, found.description)
    console.print(table)


def _print_records(console: Console, records: list[dict]) -> None:
    from jax_tcgemm.bench.records import best_peer, contender_name, grouped, shape

    for (suite, dtype), group in grouped(records).items():
        title = f"{suite}, {dtype}, {group[0]['machine']['device']}"
        table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("case", "implementation", "ran"):
            table.add_column(heading, overflow="fold")
        for heading in ("µs", "TFLOP/s", "GB/s", "peak MB", "error", "best peer", "ratio"):
            table.add_column(heading, justify="right")
        ratios: dict[str, list[float]] = {}
        for record in group:
            peer = best_peer(record)
            if record["ratio"] is not None:
                ratios.setdefault(contender_name(record), []).append(record["ratio"])
            table.add_row(
                f"{record['label']} {shape(record)}".strip(),
                contender_name(record),
                f"{record['ran']}/{record['config']}",
                f"{record['us']['p50']:.1f}",
                f"{record['tflops']:.4g}",
                f"{record['gbps']:.4g}",
                f"{record['peak_bytes'] / 1e6:.4g}" if record["peak_bytes"] else "",
                f"{record['error']:.1e}",
                f"{peer[0]} {peer[1]:.1f}" if peer else "",
                f"{record['ratio']:.3f}" if peer else "",
            )
        console.print(table)
        for name, values in ratios.items():
            mean = math.exp(sum(map(math.log, values)) / len(values))
            console.print(f"{name}: geomean {mean:.3f}, least {min(values):.3f}")
