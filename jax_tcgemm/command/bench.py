"""The command line of the benchmark: ``python -m jax_tcgemm bench``, and what is below it."""

import contextlib
import math
import pathlib
import secrets
from collections.abc import Callable, Iterator
from typing import Annotated

import jax
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from jax_tcgemm.bench import contenders, harness, records, suites
from jax_tcgemm.bench import decode as decode_steps
from jax_tcgemm.bench import parallel as layer
from jax_tcgemm.bench import programs as in_programs
from jax_tcgemm.bench import regret as random_choices
from jax_tcgemm.bench import sweep as random_programs
from jax_tcgemm.bench.overhead import measure_overhead
from jax_tcgemm.bench.random_problems.kinds import KINDS, random_problems
from jax_tcgemm.bench.render import render as render_files
from jax_tcgemm.command.terminal import errors_as_text, output
from jax_tcgemm.selection import default_device
from jax_tcgemm.tuning import timing
from jax_tcgemm.tuning.measuring import check_positive

app = typer.Typer(help="Measure products beside XLA and cuBLASLt.", invoke_without_command=True)

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


@app.callback()
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
    part: Annotated[
        str, typer.Option(help="Measure a share of the cases: I/N is every N-th from the I-th on.")
    ] = "1/1",
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
    console = output()
    with errors_as_text():
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
        check_positive("bench", "budget", budget)
        dtypes = dtype.split(",") if dtype else None
        chosen = [suites.load_suite(name, dtypes) for name in suite.split(",")]
        chosen = suites.part_of(chosen, part)
        implementations = contenders.parse_implementations(impl)
        contenders.check_configs(implementations, config)
        options = harness.Options(
            implementations=implementations,
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


@app.command()
def overhead(
    impl: _Forced = None,
    samples: Annotated[int, typer.Option(min=2, help="Measurements of each step.")] = 100,
    out: _Records = None,
    revision: _Revision = None,
) -> None:
    """Measure what one of our calls costs the host, beside lax.dot_general."""
    console = output()
    with errors_as_text(), console.status("measuring"):
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
        records.append_records(out, found)


@app.command()
def programs(
    suite: Annotated[
        str | None, typer.Option(help="Products of these suites; small models by default.")
    ] = None,
    only: Annotated[str, typer.Option(help="Programs with this in their names.")] = "",
    impl: _Forced = None,
    samples: Annotated[int, typer.Option(min=2, help="Calls of each program.")] = 21,
    out: _Records = None,
    revision: _Revision = None,
) -> None:
    """Measure products inside programs, in loops, beside plain JAX."""
    console = output()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    table = Table(*in_programs.HEAD)
    with errors_as_text(), jax.enable_x64(suite is not None):  # Cases say their own types.
        if suite is None:
            found = in_programs.models(impl)
        else:
            found = in_programs.products(_products(suite), impl)
        for program in found:
            if only not in program.label:
                continue
            with console.status(f"measuring {program.label}"):
                record = in_programs.measure(program, samples, revision)
            if out is not None:
                records.append_records(out, [record])
            table.add_row(*in_programs.row(record))
        if not table.rows:
            raise ValueError(
                f"bench: --only must be part of a program's name, got {only=}; "
                "without it all are measured"
            )
    console.print(table)


def _products(names: str) -> list[suites.Case]:
    cases = [case for name in names.split(",") for case in suites.load_suite(name).cases]
    if others := {case.suite for case in cases if case.kind != "product"}:
        raise ValueError(
            f"bench: every suite must be of plain products, got {', '.join(sorted(others))}; "
            "--list shows what there is"
        )
    return cases


@app.command()
def parallel(
    devices: Annotated[str, typer.Option(help="Numbers of devices, comma-separated.")] = "2,4",
    tokens: Annotated[int, typer.Option(min=1, help="Rows of the layer's input.")] = 8192,
    model: Annotated[int, typer.Option(min=1, help="Columns of the layer's input.")] = 8192,
    hidden: Annotated[int, typer.Option(min=1, help="Columns of the hidden layer.")] = 28672,
    dtype: Annotated[str, typer.Option(help="Dtype of all arrays.")] = "bfloat16",
    chunks: Annotated[
        str, typer.Option(help="Chunks in which a shard is moved, comma-separated; auto selects.")
    ] = "auto",
    impl: _Forced = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps in flight in one sample.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each contender.")] = 10,
    out: _Records = None,
    revision: _Revision = None,
) -> None:
    """Measure a tensor-parallel MLP, forward and backward, beside XLA's."""
    console = output()
    with errors_as_text():
        counts = [_number("devices", count) for count in devices.split(",")]
        pieces = [
            None if count == "auto" else _number("chunks", count) for count in chunks.split(",")
        ]
    for count in counts:
        with errors_as_text(), console.status(f"measuring on {count} devices"):
            record = layer.measure(
                count,
                tokens,
                model,
                hidden,
                dtype=dtype,
                chunks=pieces,
                implementation=impl,
                steps=steps,
                samples=samples,
                revision=revision,
            )
        if out is not None:
            records.append_records(out, [record])
        title = f"{count} devices, {tokens} tokens, {model} -> {hidden} -> {model}, {dtype}"
        table = Table(*layer.HEAD, title=title)
        for row in layer.rows(record):
            table.add_row(*row)
        console.print(table)


@app.command()
def decode(
    devices: Annotated[int, typer.Option(min=2, help="Number of devices.")] = 2,
    rows: Annotated[
        str, typer.Option(help="Numbers of rows, comma-separated.")
    ] = "1,4,16,64,256,512",
    model: Annotated[int, typer.Option(min=1, help="Columns of a layer's input.")] = 8192,
    hidden: Annotated[int, typer.Option(min=1, help="Columns of the hidden layer.")] = 28672,
    steps: Annotated[int, typer.Option(min=1, help="Programs in flight in one sample.")] = 20,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each contender.")] = 9,
    out: _Records = None,
    revision: _Revision = None,
) -> None:
    """Measure decode steps of a tensor-parallel MLP, with sums by all_reduce and by XLA."""
    console = output()
    with errors_as_text(), console.status(f"measuring on {devices} devices"):
        counts = [_number("rows", count) for count in rows.split(",")]
        found = decode_steps.measure(
            devices,
            counts,
            model,
            hidden,
            steps=steps,
            samples=samples,
            revision=revision,
        )
    if out is not None:
        records.append_records(out, found)
    title = f"{devices} devices, {model} -> {hidden} -> {model}, bfloat16, µs of a layer"
    table = Table(*decode_steps.HEAD, title=title)
    for record in found:
        table.add_row(*decode_steps.row(record))
    console.print(table)


@app.command()
def regret(
    problems: Annotated[int, typer.Option(min=1, help="Number of random problems.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(help="Append rows to this CSV file; problems that it has are not measured."),
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds of calls for one problem.")] = 0.5,
    limit: Annotated[
        float, typer.Option(help="Seconds in all, after which no problems are begun.")
    ] = math.inf,
    scale: Annotated[
        float, typer.Option(help="Factor on the logarithms of sizes; below 1 for slow machines.")
    ] = 1.0,
) -> None:
    """Measure how much slower than the best our choices for random problems are."""
    console = output()
    with errors_as_text():
        check_positive("bench", "budget", budget)
        check_positive("bench", "scale", scale)
        drawn = random_choices.random_problems(problems, seed, scale)
        found = random_choices.read(out) if out is not None else []
        known = {outcome.draw.key for outcome in found}
        draws = [draw for draw in drawn if draw.key not in known]
        with _progress(len(draws)) as advance:
            for outcome in random_choices.measure(
                draws, default_device(), budget_s=budget, limit_s=limit, advance=advance
            ):
                found.append(outcome)
                if out is not None:
                    random_choices.append(out, outcome)
    table, text = random_choices.summary(found)
    console.print(table)
    console.print(text, highlight=False, soft_wrap=True)


@app.command()
def sweep(
    problems: Annotated[int, typer.Option(min=1, help="Number of random problems.")] = 300,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Random seed; a new one by default."),
    ] = None,
    kinds: Annotated[
        str | None, typer.Option(help="Kinds of problems, comma-separated; all by default.")
    ] = None,
    limit: Annotated[
        float, typer.Option(help="Seconds in all, after which no problems are begun.")
    ] = math.inf,
    out: _Records = None,
    revision: _Revision = None,
) -> None:
    """Measure random problems of many kinds by the default choice beside XLA."""
    console = output()
    with errors_as_text():
        chosen = kinds.split(",") if kinds else list(KINDS)
        if unknown := [kind for kind in chosen if kind not in KINDS]:
            raise ValueError(
                f"bench: kinds must be among {', '.join(KINDS)}, got {', '.join(unknown)}; "
                "leave the option out for all"
            )
    seed = secrets.randbelow(2**31) if seed is None else seed
    shared, found = random_programs.shared_fields(seed, revision), []
    with jax.enable_x64(True):
        drawn = random_problems(problems, seed, chosen)
    with _progress(len(drawn)) as advance:
        for record in random_programs.measure(drawn, limit_s=limit, advance=advance):
            found.append(shared | record)
            if out is not None:
                records.append_records(out, found[-1:])
    for table in random_programs.tables(found):
        if table.rows:
            console.print(table)
    wrong = sum(map(random_programs.is_wrong, found))
    slow = sum(map(random_programs.is_slow, found))
    text = f"{len(found)} problems of seed {seed}: {wrong} wrong, {slow} clearly slower than XLA"
    console.print(text, highlight=False)
    if wrong:
        raise typer.Exit(1)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar on stderr; yields advance(description, newly_finished)."""
    with Progress(*harness.COLUMNS, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=total)

        def advance(what: str, number: int) -> None:
            progress.update(task, description=what, advance=number)
            if number and not progress.console.is_terminal:
                done = progress.tasks[0]
                progress.console.print(
                    f"[{done.completed:g}/{total}] {done.elapsed:.0f} s", highlight=False
                )

        yield advance


@app.command()
def render(
    root: Annotated[pathlib.Path, typer.Option(help="The checkout.")] = pathlib.Path(),
    check: Annotated[bool, typer.Option("--check", help="Only tell what is out of date.")] = False,
) -> None:
    """Bring the tables and charts of the documentation up to date with benchmarks/results."""
    with errors_as_text():
        changed = render_files(root, check)
    for path in changed:
        typer.echo(f"{'out of date' if check else 'wrote'}: {path}")
    if check and changed:
        raise typer.Exit(1)


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(
            f"bench: {name} must be numbers, comma-separated, got {text!r}; write such as 2,4"
        )
    return int(text)


def _print_suites(console: Console) -> None:
    table = Table("suite", "cases", "dtypes", "what")
    for name in suites.suite_names():
        found = suites.load_suite(name)
        dtypes = ", ".join(dict.fromkeys(case.dtype for case in found.cases))
        table.add_row(name, str(len(found.cases)), dtypes, found.description)
    console.print(table)


def _print_records(console: Console, found: list[dict]) -> None:
    for (suite, dtype), group in records.grouped(found).items():
        title = f"{suite}, {dtype}, {group[0]['machine']['device']}"
        table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("case", "implementation", "ran"):
            table.add_column(heading, overflow="fold")
        for heading in ("µs", "TFLOP/s", "GB/s", "peak MB", "error", "best peer", "ratio"):
            table.add_column(heading, justify="right")
        ratios: dict[str, list[float]] = {}
        for record in group:
            peer = records.best_peer(record)
            if record["ratio"] is not None:
                ratios.setdefault(records.contender_name(record), []).append(record["ratio"])
            table.add_row(
                f"{record['label']} {records.shape(record)}".strip(),
                records.contender_name(record),
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
