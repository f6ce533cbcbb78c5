"""Where the operands and results of an epilogue lie, in terms of the folded problem."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from jax_tcgemm.epilogues import EpilogueSource, Read, Reduction
from jax_tcgemm.epilogues.code.places import everywhere, linear
from jax_tcgemm.problem.function import (
    MOST_INDICES,
    MOST_READS,
    MOST_RESULTS,
    Function,
    Index,
    Strides,
    make_function,
)
from jax_tcgemm.problem.gemm import Problem


@dataclasses.dataclass(frozen=True)
class Levels:
    """The dimensions of the result, other than those of extent 1, in each of the problem's four."""

    outer: tuple[int, ...]
    inner: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]

    @classmethod
    def all_of(cls, problem: Problem, shape: tuple[int, ...]) -> Iterator["Levels"]:
        """Yield the levels of the problem, then those with its one batch level split in two."""
        axes = [axis for axis, extent in enumerate(shape) if extent != 1]

        def take(extent: int) -> tuple[int, ...]:
            run = []
            while math.prod(shape[axis] for axis in run) != extent:
                run.append(axes.pop(0))
            return tuple(run)

        outer = take(problem.batch // max(problem.batch_inner, 1))
        inner, m, n = take(problem.batch_inner), take(problem.m), take(problem.n)
        yield cls(outer, inner, m, n)
        for first in range(1, 0 if outer else len(inner)):
            yield cls(inner[:first], inner[first:], m, n)

    def are_rows_from(self, axis: int) -> bool:
        """Whether dimensions from this one on are the columns, and those before it no columns."""
        before = (*self.outer, *self.inner, *self.m)
        return all(x < axis for x in before) and all(x >= axis for x in self.n)


def placed_function(
    source: EpilogueSource,
    shape: tuple[int, ...],
    levels: Levels,
    strides: Iterable[Strides | None],
    beside: tuple[int, ...] = (),
) -> tuple[Function, tuple[int, ...]] | str:
    """The function with its operands beside the folded product and the operands, or an obstacle.

    Args:
      source: its code.
      shape: of an accumulator.
      levels: what its dimensions are in the problem.
      strides: of each of `source.reads`, None where it has none.
      beside: results, by number, each of which is one array with the one before it.
    """
    over = tuple(
        "beside" if number in beside else _over(x.reduction, levels)
        for number, x in enumerate(source.results)
    )
    if None in over:
        return "a result is a reduction of neither whole rows nor whole columns, which XLA does"
    operands = tuple(dict.fromkeys(read.operand for read in source.reads))
    num_indices = max(source.index_dimensions, default=-1) + 1
    for what, number, most in (
        ("reads more than", len(source.reads), MOST_READS),
        ("has more results than", len(source.results), MOST_RESULTS),
        ("asks for indices of more dimensions than", num_indices, MOST_INDICES),
    ):
        if number > most:
            return f"its function {what} {most}"
    strides = tuple(strides)
    if None in strides:
        operand = source.reads[strides.index(None)].operand
        return f"operand {operand} of its function has no stride along the product"
    indices = tuple(_index(dim, levels, shape) for dim in range(num_indices))
    numbers = tuple(operands.index(read.operand) for read in source.reads)
    return make_function(source, numbers, strides, indices, over), operands


def _over(reduction: Reduction | None, levels: Levels) -> str | None:
    """Over what a kernel begins to reduce a result, as of `Result`; None where it cannot."""
    if reduction is None:
        return ""
    reduced = set(reduction.dimensions)
    if levels.n and reduced.issuperset(levels.n):
        return "columns"
    return "rows" if levels.m and reduced.issuperset(levels.m) else None


def strides_of(
    source: EpilogueSource,
    operand_shapes: Sequence[tuple[int, ...]],
    levels: Levels,
    shape: tuple[int, ...],
    by_group: Sequence[bool] | None = None,
) -> Iterator[Strides | None]:
    """Yield the strides of each of `source.reads`, as `placed_function` takes them.

    Args:
      source: code of the function.
      operand_shapes: shapes of the function's operands.
      levels: dimensions of the accumulator in the problem.
      shape: shape of the accumulator.
      by_group: for each operand, whether it is held by group, as (*batch, groups, 1, columns);
        None: none is.
    """
    for read in source.reads:
        held = operand_shapes[read.operand]
        if by_group is not None and by_group[read.operand]:
            yield _strides_by_group(read, held, levels, shape)
        else:
            yield strides_along(*read.strides(held, len(shape)), levels, shape)


def _strides_by_group(read: Read, held, levels: Levels, shape) -> Strides | None:
    """Strides of an operand that is held by group; None where no strides say that."""
    *batch, groups, _, columns = held
    if read.places[-2] != everywhere(shape)[-2]:
        return None  # Another row's group is asked for.
    # Batch dimensions of extent 1 stand for any; the row says nothing beside its group.
    packed = [math.prod(batch[i + 1 :]) * groups * columns for i in range(len(batch))]
    packed = [0 if n == 1 else stride for n, stride in zip(batch, packed, strict=True)]
    place = linear(read.places, (*packed, 0, 1), len(shape))
    found = strides_along(place.offset, place.factors, levels, shape)
    return found and dataclasses.replace(found, batch_inner=columns)


def strides_along(
    offset: int, factors: tuple[int, ...], levels: Levels, shape: tuple[int, ...]
) -> Strides | None:
    """Strides in the problem from those along the result's dimensions; None where there are none.

    Args:
      offset: of the first element.
      factors: the strides along the dimensions.
      levels: what these are in the problem.
      shape: their extents.
    """

    def stride(axes: Sequence[int]) -> int | None:
        """That along dimensions which collapse; None where they do not."""
        if not axes:
            return 0
        expected = factors[axes[-1]]
        for axis in reversed(axes):
            if factors[axis] != expected:
                return None
            expected *= shape[axis]
        return factors[axes[-1]]

    m_outer, m_inner, period = 0, stride(levels.m), math.prod(shape[axis] for axis in levels.m)
    for first in range(1, len(levels.m)):
        if m_inner is not None:
            break
        m_outer, m_inner = stride(levels.m[:first]), stride(levels.m[first:])
        period = math.prod(shape[axis] for axis in levels.m[first:])
        m_inner = None if m_outer is None else m_inner
    others = [stride(axes) for axes in (levels.outer, levels.inner, levels.n)]
    if m_inner is None or None in others:
        return None
    outer, inner, n = others
    return Strides(offset, outer, inner, m_outer, m_inner, max(period, 1), n)


def _index(dim: int, levels: Levels, shape) -> Index:
    for level, axes in enumerate((levels.outer, levels.inner, levels.m, levels.n)):
        if dim in axes:
            after = axes[axes.index(dim) + 1 :]
            return Index(level, math.prod(shape[x] for x in after), shape[dim], len(axes) == 1)
    return Index(2, 1, 1, False)  # of extent 1, which nothing asks for
