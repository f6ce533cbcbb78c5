"""Groups of equations: one or two products, and the elementwise equations of their epilogue.

`groups.py` finds the groups of a program.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jax.extend import core

from jax_tcgemm.epilogues.code.values import Equation
from jax_tcgemm.epilogues.concatenation import Concatenation
from jax_tcgemm.epilogues.gate_up import GateUp

# Position of an equation or a group in the program. Equation i is at (i, 0). Groups just before it
# are at (i, j) with j < 0, in ascending order of j.
Place = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The largest numbers of operands and of results of a group."""

    reads: int
    results: int


@dataclasses.dataclass(frozen=True)
class Products:
    """Queries about the products of a program, as functions of an equation's number.

    Attributes:
      product: the product's result; None if the equation cannot be a product of a group.
      lines: the row dimensions and the column dimensions of the product; calls can reduce results
        over either or both.
      partners: earlier products that one call can compute together with this one.
      can_split: whether a call can compute gate and up of a stacked product.
    """

    product: Callable[[int], core.Var | None]
    lines: Callable[[int], tuple[frozenset[int], frozenset[int]]] = lambda _: (frozenset(),) * 2
    partners: Callable[[int], Sequence[int]] = lambda _: ()
    can_split: Callable[[int, GateUp], bool] = lambda *_: False


@dataclasses.dataclass(frozen=True)
class Group:
    """One or two products with the elementwise equations of their epilogue.

    Attributes:
      products: numbers of the equations of one or two products.
      gate_up: None, or how one stacked product is split into gate and up.
      before: numbers of equations that `gate_up.chain` needs.
      members: numbers of the other equations, in program order.
      inputs: variables that the equations read besides the products.
      results: variables that the rest of the program reads.
      repeated: numbers of members that XLA recomputes after the call, from the call's results and
        earlier variables, so that fewer results are stored.
      place: position of the group in the program.
    """

    products: tuple[int, ...]
    gate_up: GateUp | None
    before: tuple[int, ...]
    members: tuple[int, ...]
    inputs: tuple[core.Var, ...]
    results: tuple[core.Var, ...]
    repeated: tuple[int, ...]
    place: Place


@dataclasses.dataclass(frozen=True)
class Grouping:
    """Groups of a program, and the reasons of products without a group.

    Attributes:
      groups: the groups in program order.
      gone: numbers of the equations that leave the program, since only groups compute them.
      why: for the number of each product that is not fused with its readers, the reason.
    """

    groups: tuple[Group, ...]
    gone: frozenset[int]
    why: dict[int, "Reason"]


@dataclasses.dataclass(frozen=True)
class Reason:
    """Reason why an equation cannot be fused into an epilogue.

    `rule` completes "EQUATION must ..." if there is an equation, and is a whole sentence if not.
    """

    eqn: core.JaxprEqn | None
    rule: str

    def __str__(self) -> str:
        return self.rule if self.eqn is None else f"{Equation(self.eqn)} must {self.rule}"


@dataclasses.dataclass
class Draft:
    """Group under construction.

    `numbers` are those of its products, and `products` their results, of one type. `before` are
    equations before the products that the group recomputes, `before_split` those of `Group.before`.
    """

    numbers: tuple[int, ...]
    products: Sequence[core.Var]
    members: tuple[int, ...]
    gate_up: GateUp | None = None
    before: tuple[int, ...] = ()
    before_split: tuple[int, ...] = ()
    inputs: Sequence[core.Var] = ()
    results: Sequence[core.Var] = ()
    repeated: tuple[int, ...] = ()
    place: Place = (0, 0)
    known: frozenset[int] = frozenset()
    # Results that are concatenations of two values.
    concatenations: list[Concatenation] = dataclasses.field(default_factory=list)
    # Reductions that are results, members that only they need, and whether reductions are allowed.
    reductions: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    reduces: bool = True

    def __post_init__(self):
        self.known = frozenset(self.members)

    def values(self, equations) -> dict[core.Var, None]:
        """Return the variables that the group computes, in order."""
        found = [*self.products]
        found += [x for number in self.members for x in equations[number].outvars]
        return dict.fromkeys(found)

    @property
    def concatenated(self) -> frozenset[core.Var]:
        """Values that are concatenated."""
        return frozenset(x for found in self.concatenations for x in found.operands)

    def lines(self, products: Products) -> tuple[frozenset[int], frozenset[int]]:
        """Return the row dimensions and the column dimensions of the group's results."""
        found = products.lines(self.numbers[0])
        if self.gate_up is None or not self.gate_up.is_dropped:
            return found
        gone = self.gate_up.dimension
        rows, columns = (frozenset(x - (x > gone) for x in line if x != gone) for line in found)
        return rows, columns

    def remove(self, numbers: set[int]) -> None:
        """Remove members from the group."""
        self.members = tuple(n for n in self.members if n not in numbers)
        self.known = frozenset(self.members)
