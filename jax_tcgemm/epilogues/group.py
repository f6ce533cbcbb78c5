"""What a group of equations is: a product, or two, and elementwise equations that go with it.

`groups.py` finds them in a program.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jax.extend import core

from jax_tcgemm.epilogues.halves import Halves
from jax_tcgemm.epilogues.joins import Join
from jax_tcgemm.epilogues.values import Equation

# Where a unit, an equation or a group, is in the program: before the equation of the first number,
# and among groups there in the order of the second. Equations have 0 for it.
Place = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most operands that a group reads, and results that it has."""

    reads: int
    results: int


@dataclasses.dataclass(frozen=True)
class Products:
    """The products of a program that groups may have: functions of the number of an equation.

    Attributes:
      product: its product, a variable; None of what is no product or cannot be part of a group.
      lines: the dimensions of its product that are rows, and those that are columns; calls can
        reduce results over either or both.
      partners: the products before it that can be one call with it.
      is_apart: whether a call can have the halves of its product.
    """

    product: Callable[[int], core.Var | None]
    lines: Callable[[int], tuple[frozenset[int], frozenset[int]]] = lambda _: (frozenset(),) * 2
    partners: Callable[[int], Sequence[int]] = lambda _: ()
    is_apart: Callable[[int, Halves], bool] = lambda *_: False


@dataclasses.dataclass(frozen=True)
class Group:
    """A product, or two, and elementwise equations.

    Attributes:
      products: the numbers of the equations of one or two products.
      halves: None, or how the one product is taken apart, which makes two of it.
      before: the numbers of equations of whole products, which `halves.members` need.
      members: the numbers of the others, in order.
      inputs: variables that they read besides the product.
      results: variables that others read.
      repeated: the numbers of members that are computed again after the call, from its results.
      place: where it is in the program.
    """

    products: tuple[int, ...]
    halves: Halves | None
    before: tuple[int, ...]
    members: tuple[int, ...]
    inputs: tuple[core.Var, ...]
    results: tuple[core.Var, ...]
    repeated: tuple[int, ...]
    place: Place


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


@dataclasses.dataclass
class Draft:
    """A group that is being made: `products` are one variable, or two of the same type."""

    numbers: tuple[int, ...]
    products: Sequence[core.Var]
    members: tuple[int, ...]
    halves: Halves | None = None
    before: tuple[int, ...] = ()
    before_halves: tuple[int, ...] = ()
    inputs: Sequence[core.Var] = ()
    results: Sequence[core.Var] = ()
    repeated: tuple[int, ...] = ()
    place: Place = (0, 0)
    known: frozenset[int] = frozenset()
    # What puts two values together in one result.
    joins: list[Join] = dataclasses.field(default_factory=list)
    # Reductions that are results, what comes before them only, and whether there may be any.
    reductions: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    reduces: bool = True

    def __post_init__(self):
        self.known = frozenset(self.members)

    def own(self, equations) -> dict[core.Var, None]:
        """The variables that it computes, in order."""
        values = [*self.products]
        values += [x for number in self.members for x in equations[number].outvars]
        return dict.fromkeys(values)

    @property
    def parts(self) -> frozenset[core.Var]:
        """The values that are put together."""
        return frozenset(x for join in self.joins for x in join.parts)

    def lines(self, products: Products) -> tuple[frozenset[int], frozenset[int]]:
        """The dimensions that are rows, and those that are columns."""
        found = products.lines(self.numbers[0])
        if self.halves is None or not self.halves.is_dropped:
            return found
        gone = self.halves.dimension
        rows, columns = (frozenset(x - (x > gone) for x in line if x != gone) for line in found)
        return rows, columns

    def remove(self, numbers: set[int]) -> None:
        """Leaves members out."""
        self.members = tuple(n for n in self.members if n not in numbers)
        self.known = frozenset(self.members)
