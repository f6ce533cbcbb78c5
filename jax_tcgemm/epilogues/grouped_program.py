"""Program whose equations are being grouped: its dependencies, and the groups so far.

`groups.py` selects the equations of a group.
"""

import collections
import heapq
import math
from collections.abc import Sequence

from jax.extend import core

from jax_tcgemm.epilogues.cuts import Cut, cheapest_cut
from jax_tcgemm.epilogues.group import Draft, Group, Limits, Place, Products, Reason
from jax_tcgemm.epilogues.membership import (
    CONCATENATIONS,
    is_elementwise,
    is_fusable,
    is_repeated,
)

# The most equations before a product that its group may compute.
_MOST_BEFORE = 64
# Primitives that add or remove dimensions of size 1.
_SHAPING = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
# Reading an operand costs nothing if it is at least this many times smaller than the result.
_SMALL = 8


class GroupedProgram:
    """Program with the groups made so far; units are equations, the results, and groups."""

    def __init__(self, equations, results, products: Products, limits: Limits):
        self._equations, self._products, self._limits = equations, products, limits
        self._end = len(equations)
        self._producer: dict[core.Var, int] = {}
        self._users: dict[core.Var, set[int]] = collections.defaultdict(set)
        for number, eqn in enumerate(equations):
            for x in eqn.invars:
                if not isinstance(x, core.Literal):
                    self._users[x].add(number)
            for x in eqn.outvars:
                self._producer[x] = number
        for x in results:
            if not isinstance(x, core.Literal):
                self._users[x].add(self._end)
        self._made_by = {x: equations[number] for x, number in self._producer.items()}
        self._places: dict[int, Place] = {}  # of groups
        # Of equations, the shape for which they are elementwise, None where there is none.
        self._shapes: dict[int, tuple[int, ...] | None] = {}
        # Of variables that groups have as results, the group.
        self._group_of: dict[core.Var, int] = {}
        self._taken: set[int] = set()
        self._of_arrays: set[tuple] = set()  # what is known not to be made of numbers alone
        self.groups: list[Group] = []
        self.gone: set[int] = set()
        self.why: dict[int, Reason] = {}

    def _inputs(self, number: int) -> list[core.Var]:
        return [x for x in self._equations[number].invars if not isinstance(x, core.Literal)]

    def _place(self, unit: int) -> Place:
        return self._places.get(unit, (unit, 0))

    def _place_of(self, x: core.Var) -> Place:
        """Return the position of the unit that computes a variable."""
        unit = self._group_of.get(x, self._producer.get(x, -1))
        return self._place(unit)

    # --- what equations are -----------------------------------------------------------------------

    def _can_fuse(self, number: int, shape) -> bool:
        """Return whether an equation has no group yet and is elementwise for a shape."""
        is_free = number < self._end and number not in self.gone
        return is_free and self._is_elementwise(number, shape)

    def _is_elementwise(self, number: int, shape) -> bool:
        if number not in self._shapes:
            eqn = self._equations[number]
            result_shape = _shape(eqn)
            self._shapes[number] = result_shape if is_elementwise(eqn, result_shape) else None
        return self._shapes[number] == shape

    def _is_fusable_user(self, unit: int) -> bool:
        is_equation = unit < self._end and unit not in self.gone
        return is_equation and is_fusable(self._equations[unit])

    def _is_of_numbers(self, x: core.Var, shape: tuple[int, ...], depth: int = 8) -> bool:
        """Return whether `x` derives from constants, so that `_cut` reads nothing for it."""
        number = self._producer.get(x)
        if number is None or depth == 0 or (x, shape) in self._of_arrays or x in self._group_of:
            return False
        is_made = self._may_repeat(number, shape) or self._is_for_nothing(number)
        if is_made and all(self._is_of_numbers(y, shape, depth - 1) for y in self._inputs(number)):
            return True
        self._of_arrays.add((x, shape))
        return False

    # --- what XLA's loops read --------------------------------------------------------------------

    def _loop(self, unit: int) -> int:
        """Return the unit whose XLA loop computes `unit`; another one only for concatenations.

        These are a pad before an addition, or a reshape before a concatenation.
        """
        for _ in range(3):
            if not unit < self._end:
                break
            eqn, following = self._equations[unit], [*self._users[self._equations[unit].outvars[0]]]
            if len(following) != 1 or not following[0] < self._end:
                break
            name, then = eqn.primitive.name, self._equations[following[0]].primitive.name
            is_concatenated = name in _SHAPING and then in CONCATENATIONS
            if not is_concatenated and not (name == "pad" and then in ("add", "add_any")):
                break
            (unit,) = following
        return unit

    def _source(self, x: core.Var, size: int, depth: int = 4) -> core.Var:
        """Return the smallest array from which XLA may compute `x`, to read instead of `x`."""
        number = self._producer.get(x)
        if number is None or depth == 0 or not self._may_repeat(number, x.aval.shape):
            return x
        large = [y for y in self._inputs(number) if not self._costs_nothing(y, size, depth - 1)]
        if len(large) != 1:
            return x
        found = self._source(large[0], size, depth - 1)
        return found if num_bytes(found) < num_bytes(x) else x

    def _costs_nothing(self, x: core.Var, size: int, depth: int = 4) -> bool:
        """Return whether a variable is small, or derives from small variables only."""
        if num_bytes(x) * _SMALL <= size:
            return True
        number = self._producer.get(x)
        if number is None or depth == 0:
            return False
        if not self._may_repeat(number, x.aval.shape):
            return False
        return all(self._costs_nothing(y, size, depth - 1) for y in self._inputs(number))

    # --- what comes before a product --------------------------------------------------------------

    def _cut(self, wanted: Sequence[core.Var], product: core.Var) -> Cut:
        """Return the min-cut that an epilogue must read besides a product for wanted values."""
        shape, size = product.aval.shape, num_bytes(product)
        # Ordered, so that groups with the same structure have inputs in the same order.
        wanted = list(dict.fromkeys(wanted))
        waiting = [-self._producer.get(x, -1) for x in wanted]
        heapq.heapify(waiting)
        before: dict[int, list[core.Var]] = {}
        while waiting and len(before) < _MOST_BEFORE:
            number = -heapq.heappop(waiting)
            if number < 0 or number in before:
                continue
            if self._may_repeat(number, shape) or self._is_for_nothing(number):
                before[number] = self._inputs(number)
                for x in before[number]:
                    heapq.heappush(waiting, -self._producer.get(x, -1))
        return cheapest_cut(wanted, self._producer, before, lambda x: self._cost(x, size, before))

    def _may_repeat(self, number: int, shape) -> bool:
        eqn = self._equations[number]
        if number in self.gone or any(x in self._group_of for x in eqn.outvars):
            return False
        return self._is_elementwise(number, shape) or is_repeated(eqn, shape)

    def _is_for_nothing(self, number: int) -> bool:
        """Return whether an equation computes a scalar from constants, or adds dimensions of 1."""
        eqn = self._equations[number]
        if self._is_elementwise(number, ()) and all(map(self._is_number, eqn.invars)):
            return True
        return is_repeated(eqn, _shape(eqn)) and num_bytes(eqn.invars[0]) == num_bytes(
            eqn.outvars[0]
        )

    def _is_number(self, x, depth: int = 4) -> bool:
        """Return whether `x` is a constant scalar, possibly marked as varying in a shard_map."""
        if isinstance(x, core.Literal):
            return True
        number = self._producer.get(x)
        if number is None or depth == 0 or not self._is_elementwise(number, ()):
            return False
        return all(self._is_number(y, depth - 1) for y in self._equations[number].invars)

    def _cost(self, x: core.Var, size: int, before) -> int:
        """Return the bytes per element to read `x`, and to write it if nothing else needs it."""
        number = self._producer.get(x, -1)
        if num_bytes(x) * _SMALL <= size:
            return int(number in before)
        users = self._users[x]
        is_stored = number < 0 or any(not self._is_fusable_user(user) for user in users)
        return x.aval.dtype.itemsize * (1 if is_stored else 2)

    # --- groups -----------------------------------------------------------------------------------

    def _add(self, draft: Draft) -> None:
        unit = self._end + 1 + len(self.groups)
        self._places[unit] = draft.place
        concatenating = [x for found in draft.concatenations for x in found.equations]
        concatenating = [self._producer[x.outvars[0]] for x in concatenating]
        following = (*draft.members, *concatenating, *draft.reduced, *draft.reductions)
        members = (*draft.before, *following)
        self.groups.append(
            Group(
                *(draft.numbers, draft.gate_up, draft.before_split, members),
                *(tuple(draft.inputs), tuple(draft.results), draft.repeated, draft.place),
            )
        )
        self._taken.update(draft.numbers)
        factors = [x for n in draft.numbers for x in self._inputs(n)]
        gate_up = draft.gate_up
        for member in (*following, *((*gate_up.chain, *gate_up.splitting) if gate_up else ())):
            self._leave(member)
        again = [x for n in draft.repeated for x in self._equations[n].outvars]
        read_again = [x for n in draft.repeated for x in self._inputs(n)]
        for x in (*draft.results, *again):
            self._group_of[x] = unit
        for x in (*factors, *draft.inputs, *read_again):
            self._users[x].add(unit)
        for member in reversed((*draft.before_split, *draft.before)):
            self._drop_unused(member)

    def _leave(self, number: int) -> None:
        """Remove an equation from the program."""
        self.gone.add(number)
        for x in self._inputs(number):
            self._users[x].discard(number)

    def _drop_unused(self, number: int) -> None:
        """Remove an equation without users, and recursively those that only it has used."""
        waiting = [number]
        while waiting:
            number = waiting.pop()
            eqn = self._equations[number]
            if number in self.gone or any(self._users[x] for x in eqn.outvars):
                continue
            shape = _shape(eqn)
            if self._is_elementwise(number, shape) or is_repeated(eqn, shape):
                self._leave(number)
                waiting += [self._producer[x] for x in self._inputs(number) if x in self._producer]


def _shape(eqn: core.JaxprEqn) -> tuple[int, ...] | None:
    """Return the shape of an equation's first result; None if it has none."""
    return getattr(eqn.outvars[0].aval, "shape", None) if eqn.outvars else None


def num_bytes(x) -> int:
    """Return the bytes of an array."""
    return math.prod(x.aval.shape) * x.aval.dtype.itemsize
