"""Observation of selections: problems are collected, and unknown problems are measured."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection.devices import Device
from jax_tcgemm.selection.ranking import candidates, measured

# Lists of (problem, device) to which `select` adds problems, one for each open `collect` block.
_collectors: list[list[tuple[Problem, Device]]] = []


@contextlib.contextmanager
def collect() -> Iterator[list[tuple[Problem, Device]]]:
    """Collect the problems for which `select` is free to choose, while the block is open."""
    found: list[tuple[Problem, Device]] = []
    _collectors.append(found)
    try:
        yield found
    finally:
        # By identity: two lists of the same problems are equal.
        _collectors[:] = [other for other in _collectors if other is not found]


class _Unseen(threading.local):
    is_on = False


_unseen = _Unseen()


class _Lowering(threading.local):
    is_on = False


_lowering = _Lowering()


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """Mark selections of this thread as made for a program that will run."""
    before, _lowering.is_on = _lowering.is_on, True
    try:
        yield
    finally:
        _lowering.is_on = before


# Returns the function that measures a problem missing from every table when the problem is lowered,
# and adds the result to a table; returns None where measuring is off.
_measurer: Callable[[], Callable[[Problem, Device], None] | None] = lambda: None  # noqa: E731


def set_measurer(measurer: Callable[[], Callable[[Problem, Device], None] | None]) -> None:
    """Set the function that returns how to measure lowered problems, or None."""
    global _measurer
    _measurer = measurer


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Neither collect nor print selections of this thread, which belong to no program."""
    before, _unseen.is_on = _unseen.is_on, True
    try:
        yield
    finally:
        _unseen.is_on = before


def is_unseen() -> bool:
    """Return whether this thread is in an `unseen` block."""
    return _unseen.is_on


def observe(problem: Problem, device: Device) -> None:
    """Add a problem to every open `collect` block, and measure the problem if it is unknown."""
    for found in tuple(_collectors):
        found.append((problem, device))
    _measure_unknown(problem, device)


def _measure_unknown(problem: Problem, device: Device) -> None:
    """Measure a problem that no table knows, if measuring is on and the problem is lowered."""
    # Callers that collect problems measure these themselves.
    if not _lowering.is_on or _collectors or (measure := _measurer()) is None:
        return
    if measured(problem, device, candidates(problem, device)) is None:
        measure(problem, device)
