"""Symbolic values that a program computes from logits, by which a loss is recognized in any form.

Let z be logits with lse = log(sum(exp(z))), p = exp(z - lse), and a label for each token. Every
value that a loss and its gradients need has one of these forms:

    a `Row`    a number for each token: const * var * exp(lam * lse + mu * m), or
               lam * lse + mu * m + losses * loss + const + var
    a `Full`   zeta * z + (alpha * p + beta * [v = label]) * slope + gamma
    a `Slope`  a polynomial of the tanh of a soft cap on z: the factor of the soft cap's derivative

Here m is the largest logit, which a program subtracts before taking exponentials, and loss = lse -
z[label]. Only rows with mu = 0 are computed. This proves that the results do not depend on m, so
that m is never needed.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.extend import core


class NotALossError(Exception):
    """Error for a program that is not a loss; the message says why."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Sum or product with one number for each token.

    A sum is lam * lse + mu * m + losses * loss + const + var. A product is const * var * exp(lam *
    lse + mu * m).

    Attributes:
      is_product: whether the row is a product; else it is a sum.
      lam: factor of lse.
      mu: factor of the largest logit.
      losses: factor of the losses; sums only.
      const: a number.
      var: a variable of the shape of the labels; None is 0 or 1.
    """

    is_product: bool = False
    lam: float = 0.0
    mu: float = 0.0
    losses: float = 0.0
    const: float = 0.0
    var: core.Var | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the row does not depend on logits."""
        return self.lam == self.mu == self.losses == 0

    @property
    def number(self) -> float | None:
        """Value of a constant row, or None."""
        return self.const if self.is_plain and self.var is None else None

    @property
    def is_positive(self) -> bool:
        """Whether the row is known to be above 0 for all logits."""
        return self.is_product and self.var is None and self.const > 0


def number(value: float) -> Row:
    """Return a row that is one number for every token."""
    return Row(const=float(value))


def variable(var: core.Var) -> Row:
    """Return a row that is a variable with the shape of the labels."""
    return Row(var=var)


LSE = Row(lam=1.0)
LARGEST = Row(mu=1.0)
LOSS = Row(losses=1.0)


class Rows:
    """Arithmetic of values per token.

    Args:
      emit: writes a function of variables into the program, and returns its result, a variable.
      lse_and_losses: returns the variables of log-sum-exps and losses.
    """

    def __init__(self, emit: Callable, lse_and_losses: Callable[[], tuple[core.Var, core.Var]]):
        self._emit, self._lse_and_losses = emit, lse_and_losses

    def add(self, a: Row, b: Row, sign: int = 1) -> Row:
        """Return the sum of two rows, or with sign -1 the difference."""
        if b.number == 0:
            return a
        if a.number == 0:
            return b if sign == 1 else self.scale(b, -1.0)
        if a.is_product and b.is_product and not a.is_plain and (a.lam, a.mu) == (b.lam, b.mu):
            own, other = (self._sum(dataclasses.replace(x, lam=0.0, mu=0.0)) for x in (a, b))
            found = self.product(self.add(own, other, sign))
            return dataclasses.replace(found, lam=a.lam, mu=a.mu)
        a, b = self._sum(a), self._sum(b)
        b = b if sign == 1 else self._sum(self.scale(b, -1.0))
        var = a.var or b.var
        if a.var is not None and b.var is not None:
            var = self._emit(jnp.add, a.var, b.var)
        return Row(
            lam=a.lam + b.lam,
            mu=a.mu + b.mu,
            losses=a.losses + b.losses,
            const=a.const + b.const,
            var=var,
        )

    def scale(self, a: Row, factor: float) -> Row:
        """Return a row times a number."""
        if a.is_product:
            return dataclasses.replace(a, const=a.const * factor)
        var = a.var
        if var is not None and factor != 1:
            var = self._emit(lambda x: x * jnp.asarray(factor, x.dtype), var)
        terms = (factor * x for x in (a.lam, a.mu, a.losses, a.const))
        return Row(False, *terms, var)

    def multiply(self, a: Row, b: Row) -> Row:
        """Return the product of two rows."""
        for x, y in ((a, b), (b, a)):
            if y.number is not None:
                return number(0) if y.number == 0 else self.scale(x, y.number)
        a, b = self.product(a), self.product(b)
        var = a.var or b.var
        if a.var is not None and b.var is not None:
            var = self._emit(jnp.multiply, a.var, b.var)
        return Row(True, a.lam + b.lam, a.mu + b.mu, 0.0, a.const * b.const, var)

    def invert(self, a: Row) -> Row:
        """Return the reciprocal of a row."""
        if a.number is not None:
            if a.number == 0:
                raise NotALossError("nothing may be divided by zero")
            return number(1 / a.number)
        a = self.product(a)
        var = None if a.var is None else self._emit(lambda x: 1 / x, a.var)
        return Row(True, -a.lam, -a.mu, 0.0, 1 / a.const, var)

    def log(self, a: Row) -> Row | None:
        """Return the logarithm of a row that is known to be above 0; None for other rows."""
        if a.number is not None and a.number > 0:
            return number(math.log(a.number))
        return Row(False, a.lam, a.mu, 0.0, math.log(a.const)) if a.is_positive else None

    def exp(self, a: Row) -> Row:
        """Return the exponential of a row."""
        a = self._sum(a)
        if a.losses == 0 and a.var is None:
            return Row(True, a.lam, a.mu, 0.0, math.exp(a.const))
        return Row(True, const=1.0, var=self._emit(jnp.exp, self.value(a)))

    def product(self, a: Row) -> Row:
        """Return a row in the form of a product."""
        if a.is_product:
            return a
        if a.number is not None:
            return Row(True, const=a.const)
        if a.is_plain and a.const == 0:
            return Row(True, const=1.0, var=a.var)
        return Row(True, const=1.0, var=self.value(a))

    def value(self, a: Row) -> core.Var:
        """Return the variable with a row's values.

        Raises:
          NotALossError: where the row depends on the largest logits.
        """
        if a.mu != 0:
            raise NotALossError("the largest logits must cancel in all that is read of them")
        if a.var is not None and a.is_plain and a.const == (1 if a.is_product else 0):
            return a.var
        found = [] if a.var is None else [a.var]
        if not a.is_plain:
            found += self._lse_and_losses()

        def computed(*given):
            rest = list(given)
            var = None if a.var is None else rest.pop(0)
            if a.is_plain:
                logarithm = terms = 0
            else:
                lse, losses = rest
                logarithm, terms = a.lam * lse, a.lam * lse + a.losses * losses
            if a.is_product:
                factor = a.const if var is None else a.const * var
                return factor if a.is_plain else factor * jnp.exp(logarithm)
            terms = terms + a.const if a.const else terms
            return terms if var is None else terms + var

        return self._emit(computed, *found)

    def _sum(self, a: Row) -> Row:
        if not a.is_product:
            return a
        if a.number is not None:
            return number(a.number)
        return variable(self.value(a))


@dataclasses.dataclass(frozen=True)
class Slope:
    """Polynomial of t = tanh(z / soft_cap), with the shape of the logits.

    Attributes:
      powers: coefficients of 1, t, t**2, ...
    """

    powers: tuple[float, ...] = (1.0,)

    @property
    def as_derivative(self) -> float | None:
        """The c of a polynomial c * (1 - t**2), the soft cap's derivative; None for others."""
        first, second, third, *rest = (*self.powers, 0.0, 0.0, 0.0)
        is_even = second == 0 and not any(rest)
        return first if is_even and math.isclose(first, -third, rel_tol=1e-6) else None

    def plus(self, other: "Slope", sign: int = 1) -> "Slope":
        """Return the sum, or with sign -1 the difference."""
        pairs = itertools.zip_longest(self.powers, other.powers, fillvalue=0.0)
        return Slope(tuple(a + sign * b for a, b in pairs))

    def times(self, other: "Slope") -> "Slope":
        """Return the product."""
        found = [0.0] * (len(self.powers) + len(other.powers) - 1)
        for i, a in enumerate(self.powers):
            for j, b in enumerate(other.powers):
                found[i + j] += a * b
        return Slope(tuple(found))


NO_SLOPE = Slope()
TANH = Slope((0.0, 1.0))


def of_slopes(name: str, operands: Sequence[Slope]) -> Slope | None:
    """Apply a primitive to slopes; return None where the result is not a slope."""
    first, *rest = operands
    if name in ("add", "add_any", "sub"):
        return first.plus(*rest, -1 if name == "sub" else 1)
    if name == "mul":
        return first.times(*rest)
    if name == "neg":
        return first.times(Slope((-1.0,)))
    if name == "square":
        return first.times(first)
    return NO_SLOPE.plus(first.times(first), -1) if name == "one_minus_square" else None


@dataclasses.dataclass(frozen=True)
class Full:
    """Value zeta * z + (alpha * p + beta * [v = label]) * slope + gamma, shaped like the logits.

    Attributes:
      zeta: a number, the factor of the logits.
      alpha: a row, the factor of the softmax p.
      beta: a row, the factor of the one-hot label.
      gamma: a row that is added.
      slope: a polynomial, the factor of the gradient terms.
    """

    zeta: float = 0.0
    alpha: Row = Row()
    beta: Row = Row()
    gamma: Row = Row()
    slope: Slope = NO_SLOPE

    @property
    def is_of_labels(self) -> bool:
        """Whether the value is 0 except at the labels."""
        is_plain = self.slope == NO_SLOPE
        return is_plain and self.zeta == 0 and self.alpha.number == self.gamma.number == 0

    @property
    def is_of_rows(self) -> bool:
        """Whether the value is a broadcast row."""
        return self.zeta == 0 and self.alpha.number == self.beta.number == 0

    @property
    def is_logits(self) -> bool:
        """Whether the value is the logits plus a row."""
        return self.zeta == 1 and self.alpha.number == self.beta.number == 0

    @property
    def is_gradient(self) -> bool:
        """Whether the value has the form of a gradient of the logits."""
        return self.zeta == 0 and self.gamma.number == 0


LOGITS = Full(zeta=1.0)


class Fulls:
    """Arithmetic of `Full` values; operations return None where the result has another form."""

    def __init__(self, rows: Rows):
        self._rows = rows

    def add(self, a: Full, b: Full, sign: int = 1) -> Full | None:
        """Return the sum, or with sign -1 the difference."""
        if a.slope != b.slope:
            # Either both have the same gradient terms, or only one has gradient terms.
            if a.is_gradient and b.is_gradient and (a.alpha, a.beta) == (b.alpha, b.beta):
                return dataclasses.replace(a, slope=a.slope.plus(b.slope, sign))
            if not a.is_of_rows and not b.is_of_rows:
                return None
        names = ("alpha", "beta", "gamma")
        found = {k: self._rows.add(getattr(a, k), getattr(b, k), sign) for k in names}
        return Full(a.zeta + sign * b.zeta, **found, slope=(b if a.is_of_rows else a).slope)

    def scale(self, a: Full, row: Row) -> Full | None:
        """Return the product with a row."""
        if a.zeta and row.number is None:
            return None
        zeta = a.zeta * row.number if a.zeta else 0.0
        rows = (self._rows.multiply(x, row) for x in (a.alpha, a.beta, a.gamma))
        return Full(zeta, *rows, a.slope)

    def multiply(self, a: Full, b: Full) -> Full | None:
        """Return the product of two values."""
        for x, y in ((a, b), (b, a)):
            if x.is_of_rows:
                return self.scale(y, x.gamma)
            if x.is_of_labels and y.slope == NO_SLOPE:
                return Full(beta=self._rows.multiply(x.beta, self.at_labels(y)))
        return None

    def exp(self, a: Full) -> Full | None:
        """Return the exponential."""
        if not a.is_logits:
            return None
        return Full(alpha=self._rows.exp(self._rows.add(LSE, a.gamma)))

    def at_labels(self, a: Full) -> Row:
        """Return the row of the value's elements at the labels."""
        rows = self._rows
        found = rows.add(a.beta, a.gamma)
        if a.zeta:
            found = rows.add(rows.scale(rows.add(LSE, LOSS, -1), a.zeta), found)
        if a.alpha.number != 0:
            of_labels = rows.exp(Row(losses=-1.0))
            found = rows.add(rows.multiply(a.alpha, of_labels), found)
        return found

    def sum(self, a: Full, size: int, where_labelled: Callable[[Row], Row]) -> Row | None:
        """Return the row of sums over a vocabulary of `size` entries.

        `where_labelled` sets a row to 0 where a label is outside the vocabulary.
        """
        if a.zeta or a.slope != NO_SLOPE:
            return None
        rows = self._rows
        labels = number(0) if a.beta.number == 0 else where_labelled(a.beta)
        return rows.add(rows.add(a.alpha, labels), rows.scale(a.gamma, float(size)))
