"""Which elementwise equations of a program go with which product.

A `Group` is a product and equations that follow it, of elements at the same place. `find_groups`
takes products from the last to the first. The equations that follow one and that no later one has
are its own, as far as there is one place in the program for all of them: after everything that they
need, and before everything that needs them. What they read of arrays of the product's shape is the
cheapest cut through the elementwise equations before them: these move to where they are needed, or
are computed again there, where less is read then. So a derivative f'(z), which is computed long
before the product that it is multiplied by, becomes a part of that one's group, and z its operand.

Work is linear in the size of the program: what is looked at for one product is bounded.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

from jax.extend import core

from jax_tcgemm.epilogues.cuts import cheapest_cut
from jax_tcgemm.epilogues.membership import (
    is_elementwise,
    is_fusable,
    is_repeated,
    rule_against,
)
from jax_tcgemm.epilogues.values import Equation

# Equations that one product's group may have after the product, and before it.
_MOST_MEMBERS = 256
_MOST_BEFORE = 64
# An operand that is so many times smaller than the result costs nothing to read.
_SMALL = 8

# Where a unit, an equation or a group, is in the program: before the equation of the first number,
# and among groups there in the order of the second. Equations have 0 for it.
_Place = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most operands that a group reads, and results that it has."""

    reads: int
    results: int


@dataclasses.dataclass(frozen=True)
class Group:
    """A product and elementwise equations.

    Attributes:
      product: the equation's number.
      members: the numbers of the others, in order.
      inputs: variables that they read besides the product.
      results: variables that others read.
      repeated: the numbers of members that are computed again after the call, from its results.
      place: where it is in the program.
    """

    product: int
    members: tuple[int, ...]
    inputs: tuple[core.Var, ...]
    results: tuple[core.Var, ...]
    repeated: tuple[int, ...]
    place: _Place


@dataclasses.dataclass(frozen=True)
class Grouping:
    """The groups of a program, and what is not in one.

    Attributes:
      groups: in the order of the program.
      gone: numbers of the equations that are in groups only.
      why: for each product that has no group the reason, if anything follows it.
    """

    groups: tuple[Group, ...]
    gone: frozenset[int]
    why: dict[int, "Reason"]


@dataclasses.dataclass(frozen=True)
class Reason:
    """What keeps an equation out of a product's epilogue: the equation, or None, and a rule."""

    eqn: core.JaxprEqn | None
    rule: str

    def __str__(self) -> str:
        return self.rule if self.eqn is None else f"{Equation(self.eqn)} must {self.rule}"


def find_groups(
    equations: Sequence[core.JaxprEqn],
    results: Sequence,
    product_of: Callable[[int], core.Var | None],
    limits: Limits,
) -> Grouping:
    """Groups the equations of a program.

    Args:
      equations: the program, in order.
      results: its results, variables or literals.
      product_of: from an equation's number to its product, a variable; None of what is no product
        or cannot be part of a group.
      limits: of each group.
    """
    level = _Program(equations, results, limits)
    for number in reversed(range(len(equations))):
        if (product := product_of(number)) is not None:
            level.take(number, product)
    return Grouping(tuple(reversed(level.groups)), frozenset(level.gone), level.why)


class _Program:
    """A program, and what is grouped of it so far. Units are equations, the results, and groups."""

    def __init__(self, equations, results, limits: Limits):
        self._equations, self._limits = equations, limits
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
        self._places: dict[int, _Place] = {}  # of groups
        # Of equations, the shape for which they are elementwise, None where there is none.
        self._shapes: dict[int, tuple[int, ...] | None] = {}
        # Of variables that groups have as results, the group.
        self._group_of: dict[core.Var, int] = {}
        self.groups: list[Group] = []
        self.gone: set[int] = set()
        self.why: dict[int, Reason] = {}

    def take(self, number: int, product: core.Var) -> None:
        """Makes the group of a product, if there is something for it."""
        members = self._following(product)
        if not members:
            if (reason := self._obstacle(product)) is not None:
                self.why[number] = reason
            return
        found = _Draft(product, tuple(members))
        while found.members:
            reason = self._shrink(found)
            if reason is None:
                break
            self.why[number] = reason
        if not found.members:
            return
        self.why.pop(number, None)
        self._add(number, found)

    # --- what follows a product -------------------------------------------------------------------

    def _following(self, product: core.Var) -> list[int]:
        """Elementwise equations of a product and others, in order, that no group has."""
        shape, members, seen = product.aval.shape, [], set()
        waiting = sorted(self._users[product])
        while waiting and len(members) < _MOST_MEMBERS:
            number = heapq.heappop(waiting)
            if number in seen or not self._can_join(number, shape):
                continue
            seen.add(number)
            members.append(number)
            for x in self._equations[number].outvars:
                for user in self._users[x]:
                    heapq.heappush(waiting, user)
        return members

    def _can_join(self, number: int, shape) -> bool:
        is_free = number < self._end and number not in self.gone
        return is_free and self._is_elementwise(number, shape)

    def _is_elementwise(self, number: int, shape) -> bool:
        if number not in self._shapes:
            eqn = self._equations[number]
            own = _shape(eqn)
            self._shapes[number] = own if is_elementwise(eqn, own) else None
        return self._shapes[number] == shape

    def _obstacle(self, product: core.Var) -> Reason | None:
        """Why nothing follows a product: names the first equation that does, None if none does."""
        users = sorted(self._users[product])
        if not users or users[0] == self._end:
            return None
        if users[0] > self._end:
            return Reason(None, "what follows is part of another product's epilogue")
        eqn = self._equations[users[0]]
        return Reason(eqn, rule_against(eqn, product.aval.shape))

    # --- one place for all of it ------------------------------------------------------------------

    def _place(self, unit: int) -> _Place:
        return self._places.get(unit, (unit, 0))

    def _place_of(self, x: core.Var) -> _Place:
        """Where a variable is known."""
        unit = self._group_of.get(x, self._producer.get(x, -1))
        return self._place(unit)

    def _shrink(self, draft: "_Draft") -> Reason | None:
        """Leaves out of a draft what cannot be part of it: None if nothing, else the reason."""
        own = draft.own(self._equations)
        users = {x: self._users[x] - draft.known for x in own}
        first = min(
            (self._place(user) for found in users.values() for user in found),
            default=(self._end, 0),
        )
        place = first[0], first[1] - 1
        late = [
            number
            for number in draft.members
            if any(x not in own and self._place_of(x) >= place for x in self._inputs(number))
        ]
        if late:
            eqn = self._equations[late[0]]
            draft.remove(self._with_following(late, draft))
            return Reason(eqn, "need nothing that comes after another use of the product")
        self._repeat_conversions(draft, users)
        if left := self._left_to_xla(draft, own, users):
            draft.remove(left)
            return Reason(self._equations[max(left)], "be read by more than what XLA fuses it into")
        draft.results = [x for x in own if users[x]]
        if draft.results == [draft.product]:
            draft.remove(set(draft.members))
            return Reason(None, "nothing reads what follows")
        draft.place = place
        self._cut(draft, own)
        for what, count, most in (
            ("would read more than", len(draft.inputs), self._limits.reads),
            ("would have more results than", len(draft.results), self._limits.results),
        ):
            if count > most:
                last = draft.members[-1]
                draft.remove({last})
                return Reason(
                    self._equations[last], f"be left out of an epilogue, which {what} {most}"
                )
        return None

    def _inputs(self, number: int) -> list[core.Var]:
        return [x for x in self._equations[number].invars if not isinstance(x, core.Literal)]

    def _with_following(self, numbers: Sequence[int], draft: "_Draft") -> set[int]:
        """Members and those that need their results."""
        found, values = set(), set()
        for number in draft.members:
            if number in numbers or any(x in values for x in self._inputs(number)):
                found.add(number)
                values.update(self._equations[number].outvars)
        return found

    def _repeat_conversions(self, draft: "_Draft", users) -> None:
        """Lets XLA convert to wider dtypes what only its loops need, too: the narrow one is stored.

        `users` are changed to that.
        """
        repeated = []
        for number in reversed(draft.members):
            eqn = self._equations[number]
            if eqn.primitive.name != "convert_element_type":
                continue
            (x,), (wide,) = eqn.invars, eqn.outvars
            is_needed = users[wide] and all(map(self._is_fusable_user, users[wide]))
            if is_needed and x in users and _bytes(x) < _bytes(wide):
                repeated.append(number)
                users[wide], users[x] = set(), users[x] | {number}
        draft.repeated = tuple(reversed(repeated))

    def _left_to_xla(self, draft: "_Draft", own, users) -> set[int]:
        """The last members that XLA may as well compute, at no more traffic; the empty set if none.

        Only equations read the last one's result which XLA makes loops of, of which it would be a
        part. They would read what it is computed from instead, again in each loop; the product's
        kernel would neither read that, if it is for nothing else, nor store the result.
        """
        size = _bytes(draft.product)
        for number in reversed(draft.members):
            outs = self._equations[number].outvars
            if any(self._users[x] & draft.known for x in outs):
                continue
            outside = set().union(*(users[x] for x in outs))
            if not all(self._is_fusable_user(user) for user in outside):
                continue
            last = self._only_for(number, draft, users)
            made = {x for n in last for x in self._equations[n].outvars}
            read = {x for n in last for x in self._inputs(n)} - made
            rest = {x for n in draft.members if n not in last for x in self._inputs(n)}
            others = {x for x in read if x not in own and not self._costs_nothing(x, size)}
            sources = {self._source(x, size) for x in others}
            read = {self._source(x, size) for x in read if x in own}
            passes = min(len(outside), 2)
            stored = sum(_bytes(x) for x in outs if users[x])
            kept = stored * (1 + passes)
            kept += sum(_bytes(self._source(x, size)) for x in others - rest)
            left = sum(_bytes(x) for x in read if not users[x])
            left += passes * sum(map(_bytes, read | sources))
            if left <= kept:
                return last
        return set()

    def _only_for(self, number: int, draft: "_Draft", users) -> set[int]:
        """A member and those that are there for it alone."""
        found = {number}
        for other in reversed(draft.members):
            outs = self._equations[other].outvars
            inside = set().union(*(self._users[x] & draft.known for x in outs))
            if inside and inside <= found and not any(users[x] for x in outs):
                found.add(other)
        return found

    def _source(self, x: core.Var, size: int, depth: int = 4) -> core.Var:
        """The narrowest array of which another one is made, which XLA may read instead."""
        number = self._producer.get(x)
        if number is None or depth == 0 or not self._may_repeat(number, x.aval.shape):
            return x
        large = [y for y in self._inputs(number) if not self._costs_nothing(y, size, depth - 1)]
        if len(large) != 1:
            return x
        found = self._source(large[0], size, depth - 1)
        return found if _bytes(found) < _bytes(x) else x

    def _costs_nothing(self, x: core.Var, size: int, depth: int = 4) -> bool:
        """Whether it is small, or made of what is small."""
        if _bytes(x) * _SMALL <= size:
            return True
        number = self._producer.get(x)
        if number is None or depth == 0:
            return False
        if not self._may_repeat(number, x.aval.shape):
            return False
        return all(self._costs_nothing(y, size, depth - 1) for y in self._inputs(number))

    def _is_fusable_user(self, unit: int) -> bool:
        is_equation = unit < self._end and unit not in self.gone
        return is_equation and is_fusable(self._equations[unit])

    # --- what comes before ------------------------------------------------------------------------

    def _cut(self, draft: "_Draft", own: set) -> None:
        """Chooses what a draft reads: sets its inputs, and the members that come before."""
        shape = draft.product.aval.shape
        # In order, so that groups that are alike read in the same one.
        wanted = [x for n in draft.members for x in self._inputs(n) if x not in own]
        wanted = list(dict.fromkeys(wanted))
        size = _bytes(draft.product)
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
        cut = cheapest_cut(wanted, self._producer, before, lambda x: self._cost(x, size, before))
        draft.before = tuple(sorted(cut.computed))
        draft.inputs = sorted(cut.read, key=self._place_of)

    def _may_repeat(self, number: int, shape) -> bool:
        eqn = self._equations[number]
        if number in self.gone or any(x in self._group_of for x in eqn.outvars):
            return False
        return self._is_elementwise(number, shape) or is_repeated(eqn, shape)

    def _is_for_nothing(self, number: int) -> bool:
        """Whether it makes a number of numbers, or gives a small array more dimensions."""
        eqn = self._equations[number]
        is_of_numbers = all(isinstance(x, core.Literal) for x in eqn.invars)
        if is_of_numbers and self._is_elementwise(number, ()):
            return True
        return is_repeated(eqn, _shape(eqn)) and _bytes(eqn.invars[0]) == _bytes(eqn.outvars[0])

    def _cost(self, x: core.Var, size: int, before) -> int:
        """Bytes of an element to read, and to write if it is only for this."""
        number = self._producer.get(x, -1)
        if _bytes(x) * _SMALL <= size:
            return int(number in before)
        users = self._users[x]
        is_stored = number < 0 or any(not self._is_fusable_user(user) for user in users)
        return x.aval.dtype.itemsize * (1 if is_stored else 2)

    # --- the group --------------------------------------------------------------------------------

    def _add(self, number: int, draft: "_Draft") -> None:
        unit = self._end + 1 + len(self.groups)
        self._places[unit] = draft.place
        members = (*draft.before, *draft.members)
        self.groups.append(
            Group(
                *(number, members, tuple(draft.inputs), tuple(draft.results)),
                *(draft.repeated, draft.place),
            )
        )
        for member in draft.members:
            self._leave(member)
        again = [x for n in draft.repeated for x in self._equations[n].outvars]
        for x in (*draft.results, *again):
            self._group_of[x] = unit
        for x in draft.inputs:
            self._users[x].add(unit)
        for member in reversed(draft.before):
            self._drop_unused(member)

    def _leave(self, number: int) -> None:
        """Takes an equation out of the program."""
        self.gone.add(number)
        for x in self._inputs(number):
            self._users[x].discard(number)

    def _drop_unused(self, number: int) -> None:
        """Takes one out that has lost its last user, and those that only it has used."""
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


@dataclasses.dataclass
class _Draft:
    """A group that is being made."""

    product: core.Var
    members: tuple[int, ...]
    before: tuple[int, ...] = ()
    inputs: Sequence[core.Var] = ()
    results: Sequence[core.Var] = ()
    repeated: tuple[int, ...] = ()
    place: _Place = (0, 0)
    known: frozenset[int] = frozenset()

    def __post_init__(self):
        self.known = frozenset(self.members)

    def own(self, equations) -> dict[core.Var, None]:
        """The variables that it computes, in order."""
        values = [self.product]
        values += [x for number in self.members for x in equations[number].outvars]
        return dict.fromkeys(values)

    def remove(self, numbers: set[int]) -> None:
        """Leaves members out."""
        self.members = tuple(n for n in self.members if n not in numbers)
        self.known = frozenset(self.members)


def _shape(eqn: core.JaxprEqn) -> tuple[int, ...] | None:
    """That of its first result, if this is an array."""
    return getattr(eqn.outvars[0].aval, "shape", None) if eqn.outvars else None


def _bytes(x) -> int:
    return math.prod(x.aval.shape) * x.aval.dtype.itemsize
