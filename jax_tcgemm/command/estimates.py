"""Estimated times of the calls of a program: a table, bars in the terminal, and a picture."""

import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich import box
from rich.bar import Bar
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jax_tcgemm.inspect.explain import Call, Explanation

_MATPLOTLIB_MISSING = (
    "demo: matplotlib must be installed to draw a picture; run pip install 'jax_tcgemm[demo]', or"
    " pip install '.[demo]' in a checkout"
)
# Columns of the terminal: of the labels of bars, of what is beside both, and of the shortest bars.
_LABEL, _BESIDE_BARS, _LEAST_BAR = 32, 32, 10
_MOST_NAMES = 5  # of operations of an epilogue


class _Time(NamedTuple):
    """One of the three times of a call, and the color of its bars (Okabe and Ito's palette)."""

    name: str
    of: Callable[[Call], float | None]
    color: str


_TIMES = (
    _Time("selected", lambda call: call.estimated_us, "#0072B2"),
    _Time("XLA", lambda call: call.xla_estimated_us, "#E69F00"),
    _Time("roofline", lambda call: call.roofline_us, "#7F7F7F"),
)


class Totals(NamedTuple):
    """Microseconds of all calls that have all three times and run a known number of times."""

    num_calls: int
    selected: float
    xla: float
    roofline: float


def totals(calls: Sequence[Call]) -> Totals:
    """Add up the three times of the calls that have all of them."""
    found = [
        [call.times * us for us in times]
        for call in calls
        if None not in (times := [time.of(call) for time in _TIMES]) and call.times is not None
    ]
    columns = zip(*found, strict=True) if found else ((), (), ())
    return Totals(len(found), *map(sum, columns))


def calls_table(title: str, explanation: Explanation) -> Table:
    """Return a table with a row for each call: the GEMM, its epilogue, what runs it, two times."""
    table = Table(title=title)
    for heading in ("M×N×K, layout", "epilogue", "implementation"):
        table.add_column(heading)
    for heading in ("selected µs", "XLA µs"):
        table.add_column(heading, justify="right")
    for call in explanation:
        times = (_microseconds(time.of(call)) for time in _TIMES[:2])
        table.add_row(_shape(call), _epilogue(call), _implementation(call), *times)
    return table


def bars(title: str, explanation: Explanation, console: Console) -> Group:
    """Return bars of the three times of each call that runs a known number of times."""
    drawn = _drawn(explanation)
    known = [us for _, call in drawn for time in _TIMES if (us := time.of(call)) is not None]
    longest = max(known, default=1.0)
    width = console.width - _LABEL - _BESIDE_BARS
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("GEMM, epilogue, implementation", width=_LABEL, no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("µs", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for number, call in drawn:
        times = [time.of(call) for time in _TIMES]
        names = Text("\n").join(Text(time.name, time.color) for time in _TIMES)
        lines = (
            _bar(us, longest, max(width, _LEAST_BAR), time.color, console)
            for time, us in zip(_TIMES, times, strict=True)
        )
        numbers = "\n".join(map(_microseconds, times))
        table.add_row(str(number), _label(call), names, numbers, Group(*lines))
    return Group(table, *_notes(explanation))


def check_picture(path: pathlib.Path) -> None:
    """Raise the error that drawing a picture to a file would end with.

    Raises:
      ModuleNotFoundError: without matplotlib, saying how to get it.
      ValueError: for a file in a folder that does not exist.
    """
    _figure_type()
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(
            f"demo: picture must be a file in a folder that exists, got picture={str(path)!r}; "
            "make the folder first"
        )


def draw(title: str, explanation: Explanation, path: pathlib.Path) -> None:
    """Draw the bars as a PNG.

    Args:
      title: above the bars.
      explanation: of the program.
      path: the file to write.

    Raises:
      ModuleNotFoundError: without matplotlib, saying how to get it.
    """
    drawn = _drawn(explanation)
    figure = _figure_type()(figsize=(10, 1.6 + 0.5 * len(drawn)), layout="constrained", dpi=130)
    axis = figure.subplots()
    for i, time in enumerate(_TIMES):
        found = [(row, time.of(call)) for row, (_, call) in enumerate(drawn)]
        rows = [row + 0.27 * (i - 1) for row, us in found if us is not None]
        lengths = [us for _, us in found if us is not None]
        axis.barh(rows, lengths, 0.25, color=time.color, label=time.name)
        for row, us in zip(rows, lengths, strict=True):
            text = f" {_microseconds(us)}"
            axis.text(us, row, text, va="center", fontsize=6)
    labels = (f"{number}: {_shape(call)}\n{_epilogue(call)}" for number, call in drawn)
    axis.set_yticks(range(len(drawn)), list(labels), fontsize=7)
    axis.set_ylim(len(drawn) - 0.5, -0.5)
    axis.set_xlabel("estimated µs")
    axis.set_title(title, loc="left", fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=9)
    figure.savefig(path, format="png", metadata={"Software": None})


def _figure_type():
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_MATPLOTLIB_MISSING) from error
    return Figure


def _drawn(explanation: Explanation) -> list[tuple[int, Call]]:
    """The calls that run a known number of times, with their numbers."""
    return [(i, call) for i, call in enumerate(explanation) if call.times is not None]


def _notes(explanation: Explanation) -> list[str]:
    """Sums, and the calls without bars."""
    total, notes = totals(explanation.calls), []
    if total.num_calls:
        notes.append(
            f"The {total.num_calls} calls with three times: selected {total.selected:.0f} µs, "
            f"XLA {total.xla:.0f} µs, roofline {total.roofline:.0f} µs. XLA's loops are counted "
            "where a kernel has an epilogue in their place."
        )
    missing = len(explanation) - len(_drawn(explanation))
    if missing:
        notes.append(f"Without bars: {missing} calls in a loop that runs only for some data.")
    return notes


def _bar(us: float | None, longest: float, width: int, color: str, console: Console):
    """A bar as long as a time; of plain characters where the output has no blocks."""
    if us is None:
        return Text("")
    if console.options.ascii_only:
        return Text("#" * max(1, round(us / longest * width)), color)
    return Bar(longest, 0, us, width=width, color=color)


def _label(call: Call) -> Text:
    lines = _shape(call), _epilogue(call), _implementation(call)
    return Text("\n").join((Text(lines[0]), Text(lines[1], "italic"), Text(lines[2], "dim")))


def _shape(call: Call) -> str:
    p = call.problem
    if p is None or p.kind != "gemm":
        return "-" if p is None else str(p)
    batch = f"{p.batch} × " if p.batch > 1 else ""
    return f"{batch}{p.m}×{p.n}×{p.k} {p.layout}"


def _epilogue(call: Call) -> str:
    names = call.epilogue[:_MOST_NAMES]
    more = ", …" if len(names) < len(call.epilogue) else ""
    return ", ".join(names) + more or "-"


def _implementation(call: Call) -> str:
    return f"{call.implementation}/{call.config}"


def _microseconds(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"
