"""Pattern match of epilogues: the elementwise equations to fuse into each product of a program.

A `Group` is a product with elementwise equations that follow it; or gate and up, as two products of
one operand or one stacked product, with equations that need elements of both. `find_groups` visits
products from the last to the first. A product gets the equations that follow it and that no later
product has, as far as one position in the program suits all of them: after all their inputs, and
before all their readers. The arrays that an epilogue reads are a min-cut through the elementwise
equations before it: these equations move into the epilogue, or are computed again there, where that
reads fewer bytes. So a derivative f'(z), computed long before the product that it is multiplied by,
becomes part of that product's epilogue, with z as its operand.

Work is linear in the size of the program: the equations visited for one product are bounded.
"""

import heapq
from collections.abc import Iterator, Sequence

from jax.extend import core

from jax_tcgemm.epilogues.concatenation import Concatenation, find_concatenation
from jax_tcgemm.epilogues.cuts import cheapest_cut
from jax_tcgemm.epilogues.gate_up import find_gate_up
from jax_tcgemm.epilogues.group import Draft, Grouping, Limits, Place, Products, Reason
from jax_tcgemm.epilogues.grouped_program import GroupedProgram, num_bytes
from jax_tcgemm.epilogues.membership import (
    is_call,
    is_reduction,
    rule_against,
)
from jax_tcgemm.system.jax_internals import has_plain_context

# The most equations after a product that its group may have.
_MOST_MEMBERS = 256
# The most equations after a group that are searched for reductions.
_MOST_REACHED = 24


def find_groups(
    equations: Sequence[core.JaxprEqn],
    results: Sequence,
    products: Products,
    limits: Limits,
) -> Grouping:
    """Group the equations of a program.

    Args:
      equations: the equations of the program, in order.
      results: the results of the program, variables or literals.
      products: queries about the products among the equations.
      limits: limits of each group.
    """
    level = _Grouping(equations, results, products, limits)
    for number in reversed(range(len(equations))):
        level.take(number)
    return Grouping(tuple(reversed(level.groups)), frozenset(level.gone), level.why)


class _Grouping(GroupedProgram):
    """Program whose products get groups."""

    def take(self, number: int) -> None:
        """Make the group of an equation that is a product, if any equation can be fused into it."""
        product = self._products.product(number)
        if product is None or number in self._taken:
            return
        unfused = None
        for draft in self._gates(number, product):
            gate_up = draft.gate_up
            if gate_up is not None and not self._products.can_split(number, gate_up):
                unfused = Reason(None, "gate and up are no column blocks of its weights")
                continue
            unfused = self._settle(draft)
            if unfused is None and self._reads_both_products(draft):
                self._add(draft)
                return
        draft = Draft((number,), (product,), self._following([product]))
        reason = self._settle(draft) if draft.members else self._obstacle(product)
        if draft.members:
            self._add(draft)
        elif unfused or reason:
            self.why[number] = unfused or reason

    def _settle(self, draft: Draft) -> Reason | None:
        """Remove members that cannot be fused from a draft; return why, if none are left."""
        last = None
        while draft.members:
            reason = self._shrink(draft)
            if reason is None:
                return None
            last = reason
        return last

    # --- two products -----------------------------------------------------------------------------

    def _gates(self, number: int, product: core.Var) -> Iterator[Draft]:
        """Yield drafts of gated GEMMs: a product with an earlier one, or a stacked product."""
        following = None
        for other in self._products.partners(number):
            if other not in self._taken:
                following = following or frozenset(self._following([product]))
                pair = self._products.product(other), product
                if following and (members := self._following_both(pair, following)):
                    yield Draft((other, number), pair, members)
        shape = product.aval.shape

        def can_fuse(member: int) -> bool:
            return self._can_fuse(member, shape) and not is_call(self._equations[member])

        gate_up = find_gate_up(product, self._equations, self._users, can_fuse)
        if gate_up is None:
            return
        following = frozenset(self._following(gate_up.outputs[1:]))
        if members := self._following_both(gate_up.outputs, following):
            yield Draft((number,), gate_up.outputs, members, gate_up)

    def _following_both(
        self, pair: Sequence[core.Var], following: frozenset[int]
    ) -> tuple[int, ...]:
        """Return the equations that follow two products, if any of them follows both; else ().

        `following` has the equations that follow the second product.
        """
        if pair[0].aval != pair[1].aval or following.isdisjoint(self._following(pair[:1])):
            return ()
        return self._following(pair)

    def _reads_both_products(self, draft: Draft) -> bool:
        """Return whether at least one member needs both products."""
        needs = {x: {place} for place, x in enumerate(draft.products)}
        for number in draft.members:
            found = set().union(*(needs.get(x, set()) for x in self._inputs(number)))
            if len(found) == 2:
                return True
            needs |= dict.fromkeys(self._equations[number].outvars, found)
        return False

    # --- what follows a product -------------------------------------------------------------------

    def _following(self, products: Sequence[core.Var]) -> tuple[int, ...]:
        """Return the elementwise equations that follow products and that no group has, in order."""
        shape, members, seen = products[0].aval.shape, [], set()
        waiting = sorted(set().union(*(self._users[x] for x in products)))
        while waiting and len(members) < _MOST_MEMBERS:
            number = heapq.heappop(waiting)
            if number in seen or not self._can_fuse(number, shape):
                continue
            seen.add(number)
            members.append(number)
            for x in self._equations[number].outvars:
                for user in self._users[x]:
                    heapq.heappush(waiting, user)
        return tuple(members)

    def _obstacle(self, product: core.Var) -> Reason | None:
        """Return why a product has no epilogue, with its first reader; None if it has no reader."""
        users = sorted(self._users[product])
        if not users or users[0] == self._end:
            return None
        if users[0] > self._end:
            return Reason(None, "what follows is part of another product's epilogue")
        eqn = self._equations[users[0]]
        return Reason(eqn, rule_against(eqn, product.aval.shape))

    # --- one position for all members -------------------------------------------------------------

    def _shrink(self, draft: Draft) -> Reason | None:
        """Remove members that cannot be fused; return None if there are none, else the reason."""
        values = draft.values(self._equations)
        users = {x: self._users[x] - draft.known for x in values}
        first = min(
            (self._place(user) for found in users.values() for user in found),
            default=(self._end, 0),
        )
        place = first[0], first[1] - 1
        between = draft.gate_up.chain if draft.gate_up else ()
        needed = [x for n in (*draft.numbers, *between) for x in self._inputs(n)]
        if any(self._place_of(x) >= place for x in needed):
            draft.remove(set(draft.members))
            return Reason(
                None, "a factor comes after another use of the product of the same operand"
            )
        late = [
            number
            for number in draft.members
            if any(x not in values and self._is_late(x, place, draft) for x in self._inputs(number))
        ]
        if late:
            eqn = self._equations[late[0]]
            draft.remove(self._with_following(late, draft))
            return Reason(eqn, "need nothing that comes after another use of the product")
        draft.place = place
        self._concatenate(draft, values, users)
        self._reduce(draft, values, users)
        left = self._repeat(draft, values, users) or self._left_to_xla(draft, values, users)
        if left:
            draft.remove(left)
            return Reason(self._equations[max(left)], "be read by more than what XLA fuses it into")
        concatenated = {x for x in draft.concatenated if users[x] == {self._end}}
        draft.results = [x for x in values if users[x] and x not in concatenated]
        draft.results += [found.result for found in draft.concatenations]
        if not any(x not in draft.products for x in draft.results):
            draft.remove(set(draft.members))
            return Reason(None, "nothing reads what follows")
        draft.results += [x for n in draft.reductions for x in self._equations[n].outvars]
        num_results = len(draft.results) + len(draft.concatenations)
        self._set_inputs(draft, values)
        for what, count, most in (
            ("would read more than", len(draft.inputs), self._limits.reads),
            ("would have more results than", num_results, self._limits.results),
        ):
            if count > most:
                if draft.reductions:
                    draft.reduces = False
                    return Reason(self._equations[draft.reductions[-1]], "be left to XLA")
                last = draft.members[-1]
                draft.remove({last})
                return Reason(
                    self._equations[last], f"be left out of an epilogue, which {what} {most}"
                )
        return None

    def _is_late(self, x: core.Var, place: Place, draft: Draft) -> bool:
        """Return whether `x` is neither available at a position nor derived from constants."""
        shape = draft.products[0].aval.shape
        return self._place_of(x) >= place and not self._is_of_numbers(x, shape)

    def _with_following(self, numbers: Sequence[int], draft: Draft) -> set[int]:
        """Return members and all members that need their results."""
        found, values = set(), set()
        for number in draft.members:
            if number in numbers or any(x in values for x in self._inputs(number)):
                found.add(number)
                values.update(self._equations[number].outvars)
        return found

    def _concatenate(self, draft: Draft, values, users) -> None:
        """Add results that are concatenations of two values along columns.

        Besides the concatenation, only reductions may read the two values. A concatenation that
        only XLA loops read is not added, since these loops can compute it. Updates `users`.
        """
        made = {x for n in draft.members for x in self._equations[n].outvars}
        draft.concatenations = []
        reached = {last for x in made for n in users[x] for last in self._with_users(n)}
        for number in sorted(reached):
            found = find_concatenation(self._equations[number], self._made_by)
            if found is None or not made.issuperset(found.operands):
                continue
            if not self._can_write(draft, found):
                continue
            numbers = {self._producer[eqn.outvars[0]] for eqn in found.equations}
            others = set().union(*(users[x] for x in found.operands)) - numbers
            if all(n < self._end and self._is_reduction(self._equations[n], draft) for n in others):
                draft.concatenations.append(found)
                users |= {x: users[x] - numbers | {self._end} for x in found.operands}

    def _with_users(self, unit: int) -> Iterator[int]:
        """Yield an equation and those that read its results."""
        if unit < self._end and unit not in self.gone:
            yield unit
            following = set().union(*(self._users[x] for x in self._equations[unit].outvars))
            yield from (n for n in following if n < self._end and n not in self.gone)

    def _can_write(self, draft: Draft, found: Concatenation) -> bool:
        """Return whether a call can write a concatenation, along columns or along last rows."""
        shape = draft.products[0].aval.shape
        last = {dim for dim in range(found.dimension, len(shape)) if shape[dim] != 1}
        is_alone = all(len(self._users[eqn.outvars[0]]) == 1 for eqn in found.equations[:-1])
        is_plain = all(map(has_plain_context, found.equations))
        if not (is_alone and is_plain and last and last in draft.lines(self._products)):
            return False
        return not all(map(self._is_fusable_user, self._users[found.result]))

    def _reduce(self, draft: Draft, values, users) -> None:
        """Add reductions over whole rows or columns, and the equations that only they need.

        A reduction is not added if an XLA loop also reads its operands: that loop can compute the
        reduction, as in a norm. Updates `users`.
        """
        draft.reductions = draft.reduced = ()
        if not draft.reduces:
            return
        reached, waiting = set(), [n for x in values for n in users[x]]
        chains: dict[int, set[int]] = {}
        while waiting and len(reached) < _MOST_REACHED:
            number = waiting.pop()
            if number in reached or not number < self._end or number in self.gone:
                continue
            reached.add(number)
            eqn = self._equations[number]
            if self._is_reduction(eqn, draft):
                chains[number] = set()
            elif self._is_elementwise(number, draft.products[0].aval.shape):
                waiting += [user for x in eqn.outvars for user in self._users[x]]
        if not chains:
            return
        for number in chains:
            chains[number] = self._only_before(number, reached, chains.keys(), values)
        while chains:
            taken = set(chains).union(*chains.values())
            wrong = {n for n, chain in chains.items() if self._is_shared({n, *chain}, taken, users)}
            if not wrong:
                break
            chains = {n: chain for n, chain in chains.items() if n not in wrong}
        taken = set(chains).union(*chains.values())
        late = any(
            self._is_late(x, draft.place, draft)
            for n in taken
            for x in self._inputs(n)
            if x not in values and self._producer.get(x) not in taken
        )
        if late or not any(users[x] - taken for x in values if x not in draft.products):
            return
        draft.reductions = tuple(sorted(chains))
        draft.reduced = tuple(sorted(taken - set(chains)))
        for x in values:
            users[x] = users[x] - taken

    def _is_reduction(self, eqn: core.JaxprEqn, draft: Draft) -> bool:
        """Return whether a call can compute a reduction of an array of the product's shape."""
        if not is_reduction(eqn, draft.products[0].aval.shape):
            return False
        axes = set(eqn.params["axes"])
        return any(line and axes >= line for line in draft.lines(self._products))

    def _only_before(self, number: int, reached, reductions, values) -> set[int]:
        """Return the elementwise equations that one reduction needs."""
        found, waiting = set(), [number]
        while waiting:
            for x in self._inputs(waiting.pop()):
                before = self._producer.get(x)
                if x in values or before not in reached or before in reductions:
                    continue
                found.add(before)
                waiting.append(before)
        return found

    def _is_shared(self, numbers: set[int], taken: set[int], users) -> bool:
        """Return whether other equations read intermediates, or XLA loops read the operands."""
        for number in numbers:
            eqn = self._equations[number]
            is_between = not eqn.primitive.name.startswith("reduce")
            if is_between and any(self._users[x] - taken for x in eqn.outvars):
                return True
            for x in self._inputs(number):
                if x in users and any(map(self._is_fusable_user, users[x] - taken)):
                    return True
        return False

    def _repeat(self, draft: Draft, values, users) -> set[int]:
        """Let XLA loops recompute members that only these loops read, if fewer bytes are stored.

        Examples are a conversion to a wider dtype, or the derivative of a gate. Sets
        `draft.repeated` and updates `users`.

        Returns:
          Members that no result needs any more.
        """
        producer = {x: n for n in draft.members for x in self._equations[n].outvars}
        is_read = {x: users[x] and all(map(self._is_fusable_user, users[x])) for x in values}
        size = num_bytes(draft.products[0])
        wanted = [x for x in values if is_read[x]]
        draft.repeated = ()
        if not any(x in producer for x in wanted):
            return set()

        def cost(x: core.Var) -> int:
            if x not in values:
                return 0 if self._costs_nothing(x, size) else self._cost(x, size, ())
            return x.aval.dtype.itemsize * (2 if is_read[x] or not users[x] else 1)

        def can_repeat(number: int) -> bool:
            outs, read = self._equations[number].outvars, self._inputs(number)
            are_known = all(x in values or self._place_of(x) < draft.place for x in read)
            return are_known and all(is_read[x] or not users[x] for x in outs)

        members = {n: self._inputs(n) for n in draft.members if can_repeat(n)}
        cut = cheapest_cut(wanted, producer, members, cost)
        draft.repeated = tuple(sorted(cut.computed))
        for number in draft.repeated:
            users |= {x: set() for x in self._equations[number].outvars}
        for x in cut.read:
            if x in values:
                users[x] = users[x] | {n for n in draft.repeated if x in self._inputs(n)}
        needed = {x for x in values if users[x]}
        left = set()
        for number in reversed(draft.members):
            if any(x in needed for x in self._equations[number].outvars):
                needed.update(self._inputs(number))
            else:
                left.add(number)
        return left

    def _left_to_xla(self, draft: Draft, values, users) -> set[int]:
        """Return the last members that XLA can compute with no more memory traffic, or set().

        Only XLA loops read the results of these members, and would compute the members themselves.
        Each loop then reads the members' inputs instead of their results. The product's kernel does
        not store the results, and does not read inputs that nothing else needs. Members that the
        same loops read, such as the operands of a concatenation, are also tried together.
        """
        loops: dict[int, frozenset[int]] = {}
        for number in draft.members:
            outs = self._equations[number].outvars
            if not any(self._users[x] & draft.known for x in outs):
                outside = set().union(*(users[x] for x in outs))
                found = frozenset(map(self._loop, outside))
                if all(map(self._is_fusable_user, found)):
                    loops[number] = found
        for number in reversed(loops):
            together = {other for other in loops if loops[other] == loops[number]}
            for numbers in dict.fromkeys((frozenset({number}), frozenset(together))):
                last = self._only_for(numbers, draft, users)
                if self._may_leave(last, len(loops[number]), draft, values, users):
                    return last
        return set()

    def _may_leave(self, last: set[int], num_loops: int, draft, values, users) -> bool:
        """Return whether members cost no more memory traffic in `num_loops` XLA loops."""
        size = num_bytes(draft.products[0])
        made = {x for n in last for x in self._equations[n].outvars}
        read = {x for n in last for x in self._inputs(n)} - made
        rest = {x for n in draft.members if n not in last for x in self._inputs(n)}
        others = {x for x in read if x not in values and not self._costs_nothing(x, size)}
        sources = {self._source(x, size) for x in others}
        read = {self._source(x, size) for x in read if x in values}
        passes = min(num_loops, 2)
        stored = sum(num_bytes(x) for x in made if users[x])
        kept = stored * (1 + passes)
        kept += sum(num_bytes(self._source(x, size)) for x in others - rest)
        left = sum(num_bytes(x) for x in read if not users[x])
        left += passes * sum(map(num_bytes, read | sources))
        return left <= kept

    def _only_for(self, numbers: frozenset[int], draft: Draft, users) -> set[int]:
        """Return members and the members that only they need."""
        found = set(numbers)
        for other in reversed(draft.members):
            outs = self._equations[other].outvars
            inside = set().union(*(self._users[x] & draft.known for x in outs))
            if inside and inside <= found and not any(users[x] for x in outs):
                found.add(other)
        return found

    # --- what comes before ------------------------------------------------------------------------

    def _set_inputs(self, draft: Draft, values) -> None:
        """Select the inputs of a draft, and the equations before the product that it computes."""
        following = *draft.members, *draft.reduced
        values = {*values, *(x for n in draft.reduced for x in self._equations[n].outvars)}
        wanted = [x for n in following for x in self._inputs(n) if x not in values]
        cut = self._cut(wanted, draft.products[0])
        draft.before, read = tuple(sorted(cut.computed)), cut.read
        if (gate_up := draft.gate_up) is not None:
            made = [x for n in gate_up.chain for x in self._equations[n].outvars]
            values = {gate_up.product, *made}
            wanted = [x for n in gate_up.chain for x in self._inputs(n) if x not in values]
            cut = self._cut(wanted, gate_up.product)
            draft.before_split, read = tuple(sorted(cut.computed)), (*read, *cut.read)
        draft.inputs = sorted(dict.fromkeys(read), key=self._place_of)
