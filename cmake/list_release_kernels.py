"""Writes release_kernels.txt: the kernels that a release's wheel holds (TCGEMM_CUDA=nvcc).

Usage: python cmake/list_release_kernels.py

They are those of prebuilt_kernels.txt and those of `wgmma` that bare products ask for most often:
products of the shapes of the table of tuned choices for an H200, in each layout and dtype, as the
table says, or as the cost model does where the table does not know one. No GPU is needed. Run it
again when the kernels' template arguments, the table or the cost model changed.
"""

import collections
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from jax_tcgemm import selection
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection import tables
from jax_tcgemm.system import modules

FOLDER = Path(__file__).resolve().parent
SHORT, LONG = FOLDER / "prebuilt_kernels.txt", FOLDER / "release_kernels.txt"

# A kernel that fewer products ask for is left to NVRTC.
_FEWEST = 3
# Element types of the operands and of the result, and how is computed.
TYPES = (
    ("bf16", "bf16", "f32"),
    ("f16", "f16", "f32"),
    ("f8e4m3fn", "bf16", "f32"),
    ("f32", "f32", "tf32"),
)
LAYOUTS = ("NN", "NT", "TN")


def tuned_entries() -> dict[str, tables.Entry]:
    """Returns the entries of the table that ships for an H200."""
    return dict(tables.read_table(tables.SHIPPED / "h200.json").entries)


def problems(shape: tuple[int, int, int, int]) -> Iterator[Problem]:
    """Yields the bare products of one (batch, m, n, k)."""
    batch, m, n, k = shape
    for (dtype, out_dtype, compute), layout in itertools.product(TYPES, LAYOUTS):
        operands = []
        for letter, rows, columns in zip(layout, (m, k), (k, n), strict=True):
            ld = rows if letter == "T" else columns
            stride = rows * columns if batch > 1 else 0
            operands.append(Operand(dtype, letter == "T", ld, 0, stride))
        yield Problem(batch, batch, m, n, k, *operands, out_dtype, compute)


def kernels(problem: Problem, entries: dict[str, tables.Entry]) -> tuple[str, ...]:
    """Returns the lines of the kernels that a product asks for; none where a library runs it."""
    device = selection.ASSUMED_GPU
    entry = entries.get(tables.problem_key(problem))
    if entry is not None:
        config = entry.config if entry.implementation == "wgmma" else None
    else:
        ranked = selection.ranked(problem, device, "wgmma")
        config = ranked[0][0].config if ranked else None
    if config is None:
        return ()
    sources = modules.cuda.kernels("wgmma", config, problem.query(), device.query())
    return tuple(f"{target} | {header} | {kernel}" for header, kernel, target in sources)


def products(step: int = 1) -> Iterator[tuple[str, ...]]:
    """Yields the kernels of every product that asks for some, of every `step`th shape."""
    entries = tuned_entries()
    pattern = re.compile(r"(?:(\d+) x )?(\d+)x(\d+)x(\d+) ")
    shapes = {tuple(int(x or 1) for x in pattern.match(key).groups()) for key in entries}
    for shape in sorted(shapes)[::step]:
        for problem in problems(shape):
            if found := kernels(problem, entries):
                yield found


def lines() -> list[str]:
    """Returns the lines of the list, Hopper's first and of these the most often asked for."""
    counts = collections.Counter(dict.fromkeys(SHORT.read_text().splitlines(), _FEWEST))
    counts.update(itertools.chain.from_iterable(products()))
    kept = [line for line, count in counts.items() if count >= _FEWEST]
    return sorted(kept, key=lambda x: (not x.startswith("sm_90a"), -counts[x], x))


if __name__ == "__main__":
    LONG.write_text("".join(f"{line}\n" for line in lines()))
