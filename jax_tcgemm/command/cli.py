"""The command line: ``python -m jax_tcgemm info | explain | demo | bench | tune | fragment``."""

import contextlib
import dataclasses
import enum
import json
import pathlib
from typing import Annotated

import jax
import typer

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.bench import contenders, suites
from jax_tcgemm.command import functions
from jax_tcgemm.command.bench import app as bench_app
from jax_tcgemm.command.demo import run_demo
from jax_tcgemm.command.terminal import errors_as_text, output
from jax_tcgemm.inspect.fragments import fragment_grid
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection import tables
from jax_tcgemm.tuning.autotune import BUDGET_S, CANDIDATES, Tuned, Tuning, tune_problems
from jax_tcgemm.tuning.measuring import check_fits, check_positive

app = typer.Typer(
    help="Tensor-core matrix multiplications for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")


class Platform(enum.StrEnum):
    """The platforms that `explain` lowers for."""

    CUDA = "cuda"
    CPU = "cpu"


_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.command()
def info(as_json: _Json = False) -> None:
    """Show versions, GPUs, and which implementations can run here and why the others cannot."""
    found = jax_tcgemm.info()
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        output().print(found)


@app.command()
def explain(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function, imported from the current directory or the environment.",
        ),
    ],
    shapes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SHAPE",
            help="The shape of each of its arguments, in quotes: 'bf16[4096,2304]', 'f32[]'.",
        ),
    ] = None,
    platform: Annotated[
        Platform | None, typer.Option(help="The platform to lower for; JAX's default otherwise.")
    ] = None,
    grad: Annotated[
        bool,
        typer.Option("--grad", help="Add the gradients of all floating-point arguments."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show what runs each product of a function of yours, and why; traces it and runs nothing."""
    texts = shapes or []
    arguments = tuple(map(functions.parse_shape, texts))
    f = functions.load_function(function)
    functions.check_count(function, f, texts)
    # Arguments of 64 bits are there only where JAX has such types.
    wide = any(jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype for x in arguments)
    with errors_as_text(), jax.enable_x64(True) if wide else contextlib.nullcontext():
        try:
            program, operands = functions.with_gradients(f, arguments) if grad else (f, arguments)
            found = jax_tcgemm.explain(program, *operands, platform=platform and platform.value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{error}{functions.place_of(error, f)}") from error
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else str(found))


@app.command()
def demo(
    implementation: Annotated[
        str | None, typer.Option(help="Force one implementation for every product.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 600,
    picture: Annotated[
        pathlib.Path | None,
        typer.Option(help="Draw the transformer layer's estimated times to this PNG."),
    ] = None,
) -> None:
    """Train a network on handwritten digits, beside the same network with jnp.matmul.

    Then show what accelerate makes of it and of a transformer layer, with estimated times on a GPU.
    """
    with errors_as_text():
        run_demo(steps, implementation, output(), picture)


@app.command()
def fragment(
    shape: Annotated[str, typer.Argument(help="Instruction shape, such as m16n16k16 or m16n8k16.")],
    dtype: Annotated[str, typer.Argument(help="Element type, such as f16.")],
    operand: Annotated[str, typer.Argument(help="a, b or c.")],
) -> None:
    """Show which lane and element of a fragment hold which matrix element."""
    with errors_as_text():
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
    budget: Annotated[float, typer.Option(help="Seconds for a problem.")] = BUDGET_S,
    configs: Annotated[
        int, typer.Option(min=1, help="Configs to measure for a problem.")
    ] = CANDIDATES,
    xla: Annotated[bool, typer.Option(help="Let XLA's own dot take part, too.")] = True,
) -> None:
    """Measure what runs each problem fastest, and remember it."""
    console = output()
    with errors_as_text():
        if not (suite or shape):
            raise ValueError(
                f"tune: problems must come from --suite or --shape, got {suite=}, {shape=}; "
                "bench --list shows the suites"
            )
        check_positive("tune", "budget", budget)
        _tune(console, suite, shape, layout, dtype, out, merge, provenance, budget, configs, xla)


def _tune(console, suite, shape, layout, dtype, out, merge, provenance, budget, configs, xla):
    """Tunes suites and shapes, and writes the table."""
    device = selection.default_device()
    _check_writable(out, device)
    problems = _problems(suite, shape, layout, dtype)
    for problem in problems:
        check_fits("tune", problem)
    found: list[Tuned] = []
    try:
        for tuned in tune_problems(
            problems,
            device,
            budget_s=budget,
            candidates=configs,
            xla=xla,
        ):
            found.append(tuned)
    finally:
        # Also of what was measured until an interruption.
        if found:
            _write(console, Tuning(device, found), out, merge, provenance)
    if not found:
        raise ValueError(
            "tune: a problem must be a product that can be measured here, got none; "
            "see python -m jax_tcgemm info"
        )


def _check_writable(out, device) -> None:
    """Raises ValueError where the table could not be written once everything is measured."""
    if out is not None and not out.parent.is_dir():
        raise ValueError(
            f"tune: out must lie in a folder that is there, got out={str(out)!r}; make it first"
        )
    path = tables.cache_file(device.key) if out is None else out
    try:
        if path is not None:
            tables.check_writable(path)
    except OSError as error:
        raise ValueError(
            f"tune: the table must be written, got {str(path)!r}: {error}; pass another --out"
        ) from error


def _write(console, result: Tuning, out, merge, provenance):
    """Prints what was tuned and writes its table."""
    console.print(result)
    table = dataclasses.replace(result.table, provenance=provenance)
    if out is None:
        path = tables.save_to_cache(table)
    else:
        (tables.merge_table if merge else tables.write_table)(out, table)
        path = out
    console.print(f"wrote {path}" if path else "[yellow]nothing was written[/]", soft_wrap=True)


def _problems(suite, shape, layout, dtype) -> list:
    """The distinct problems that suites and shapes come to."""
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
                    if isinstance(call.problem, Problem):  # others have nothing to choose
                        found[call.problem] = None
    return list(found)
