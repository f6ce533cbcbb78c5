"""Min-cut through equations: the cheapest variables to read, from which others are computed."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from jax.extend import core


@dataclasses.dataclass(frozen=True)
class Cut:
    """Variables to read, and the numbers of the equations to compute from them."""

    read: tuple[core.Var, ...]
    computed: frozenset[int]


def cheapest_cut(
    wanted: Iterable[core.Var],
    producer: Mapping[core.Var, int],
    equations: Mapping[int, Sequence[core.Var]],
    cost: Callable[[core.Var], int],
) -> Cut:
    """Find the variables of least total cost from which the wanted ones can be computed.

    The min-cut is found by a maximum flow from variables that no equation computes to the wanted
    ones. Among min-cuts, the one with the fewest computed equations is returned.

    Args:
      wanted: the variables to compute, or to read.
      producer: the number of the equation that computes each variable.
      equations: the equations that may be computed, with the variables that they read.
      cost: the cost of reading a variable, a small integer; variables of cost 0 are always read.
    """
    wanted = dict.fromkeys(wanted)
    if not any(producer.get(x) in equations for x in wanted):
        return Cut(tuple(wanted), frozenset())
    flow = _Flow(producer, equations, cost)
    for x in wanted:
        while flow.augment(x):
            pass
    # Variables that can be reached in the residual graph are computed; the others are read.
    read, computed, seen, waiting = {}, set(), set(), list(wanted)[::-1]
    reached = flow.reached(wanted)
    while waiting:
        x = waiting.pop()
        if x in seen:
            continue
        seen.add(x)
        if (x, _BEFORE) in reached:
            number = producer[x]
            computed.add(number)
            waiting += reversed(equations[number])
        else:
            read[x] = None
    return Cut(tuple(read), frozenset(computed))


# A variable is two nodes, before and after the read, with an edge whose capacity is its cost.
_BEFORE, _AFTER = 0, 1


class _Flow:
    """Maximum flow from wanted variables back to their sources."""

    def __init__(self, producer, equations, cost):
        self._producer, self._equations = producer, equations
        self._cost = functools.cache(cost)
        self._through: dict[core.Var, int] = collections.defaultdict(int)
        # On the edge from a variable to one that its equation reads.
        self._between: dict[tuple[core.Var, core.Var], int] = collections.defaultdict(int)
        self._readers: dict[core.Var, set[core.Var]] = collections.defaultdict(set)

    def augment(self, wanted: core.Var) -> bool:
        """Send more flow from a wanted variable to a source; return whether that was possible."""
        start = (wanted, _AFTER)
        came_from, queue = {start: None}, collections.deque([start])
        while queue:
            node = queue.popleft()
            x, side = node
            if side == _BEFORE and self._is_source(x):
                self._send(node, came_from)
                return True
            for following in self._neighbors(node):
                if following not in came_from:
                    came_from[following] = node
                    queue.append(following)
        return False

    def reached(self, wanted: Iterable[core.Var]) -> set:
        """Return every node that is reachable from a wanted variable in the residual graph."""
        seen = {(x, _AFTER) for x in wanted}
        queue = collections.deque(seen)
        while queue:
            for following in self._neighbors(queue.popleft()):
                if following not in seen:
                    seen.add(following)
                    queue.append(following)
        return seen

    def _is_source(self, x: core.Var) -> bool:
        return self._producer.get(x) not in self._equations

    def _neighbors(self, node):
        x, side = node
        if side == _AFTER:
            if self._through[x] < self._cost(x):
                yield x, _BEFORE
            for reader in self._readers[x]:  # a flow that came by here may be sent elsewhere
                if self._between[reader, x] > 0:
                    yield reader, _BEFORE
            return
        if self._through[x] > 0:
            yield x, _AFTER
        if not self._is_source(x):
            for other in self._equations[self._producer[x]]:
                yield other, _AFTER

    def _send(self, node, came_from) -> None:
        """Send as much flow along a path as its residual capacity allows."""
        path = []
        while (before := came_from[node]) is not None:
            path.append((before, node))
            node = before
        amount = min(self._room(*edge) for edge in path)
        for (x, side), (y, _) in path:
            if x is y:
                self._through[x] += amount if side == _AFTER else -amount
            elif side == _BEFORE:
                self._between[x, y] += amount
                self._readers[y].add(x)
            else:
                self._between[y, x] -= amount

    def _room(self, before, node) -> float:
        (x, side), (y, _) = before, node
        if x is y:
            return self._cost(x) - self._through[x] if side == _AFTER else self._through[x]
        return math.inf if side == _BEFORE else self._between[y, x]


def needed_equations(
    equations: Sequence[core.JaxprEqn], results: Iterable, given: Collection[core.Var] = ()
) -> list[core.JaxprEqn]:
    """Return the equations that compute results from `given` and the arguments."""
    live, kept = {x for x in variables(results) if x not in given}, []
    for eqn in reversed(equations):
        if not live.isdisjoint(eqn.outvars):
            live.update(x for x in variables(eqn.invars) if x not in given)
            kept.append(eqn)
    return kept[::-1]


def variables(atoms: Iterable) -> list[core.Var]:
    """Return those of some atoms that are no literals."""
    return [x for x in atoms if not isinstance(x, core.Literal)]
