"""Rules of elementwise primitives for values that a program computes from logits."""

import dataclasses
import math

from jax_tcgemm.passes.losses import values as lv
from jax_tcgemm.passes.losses.values import Full, Fulls, Row, Rows, Slope


class Elementwise:
    """Results of elementwise primitives on the symbolic values of `values`."""

    def __init__(self, rows: Rows, fulls: Fulls):
        self._rows, self._fulls = rows, fulls

    def of_fulls(self, name: str, operands) -> Full | Slope | None:
        """Return a result with the shape of the logits; None if it has no symbolic form."""
        if any(isinstance(x, Slope) for x in operands):
            return self._of_slopes(name, operands)
        if name == "select_n":
            which, otherwise, chosen = operands
            is_where = isinstance(which, Full) and which.is_of_labels and which.beta.number == 1
            if not is_where or not isinstance(chosen, Full) or otherwise != Full():
                return None
            return self._fulls.multiply(which, chosen)
        fulls = [x if isinstance(x, Full) else Full(gamma=x) for x in operands]
        if any(isinstance(x.gamma, bool) for x in fulls):
            return None
        if name in ("add", "add_any", "sub"):
            return self._fulls.add(*fulls, -1 if name == "sub" else 1)
        if name == "mul":
            return self._fulls.multiply(*fulls)
        if name == "div" and fulls[1].is_of_rows:
            return self._fulls.scale(fulls[0], self._rows.invert(fulls[1].gamma))
        if name == "neg":
            return self._fulls.scale(fulls[0], lv.number(-1))
        return self._fulls.exp(fulls[0]) if name == "exp" else None

    def _of_slopes(self, name: str, operands) -> Full | Slope | None:
        numbers = [_number_of(x) for x in operands]
        slopes = [x if n is None else Slope((n,)) for x, n in zip(operands, numbers, strict=True)]
        if all(isinstance(x, Slope) for x in slopes):
            if name == "div" and numbers[1]:
                name, slopes[1] = "mul", Slope((1 / numbers[1],))
            return lv.of_slopes(name, slopes)
        for x, slope in (operands, operands[::-1]) if name == "mul" else ():
            if isinstance(x, Full) and x.is_gradient and isinstance(slope, Slope):
                return dataclasses.replace(x, slope=x.slope.times(slope))
        return None

    def of_rows(self, name: str, operands) -> Row | bool | None:
        """Return a result with one number for each token; None if it has no symbolic form."""
        rows = self._rows
        if name == "select_n":
            # A predicate that is known to be true selects the last operand.
            return operands[2] if operands[0] is True else None
        if any(isinstance(x, bool) for x in operands):
            return None
        if name in ("add", "add_any", "sub"):
            return rows.add(*operands, -1 if name == "sub" else 1)
        if name == "mul":
            return rows.multiply(*operands)
        if name == "div":
            return rows.multiply(operands[0], rows.invert(operands[1]))
        if name == "neg":
            return rows.scale(operands[0], -1.0)
        if name == "log":
            return rows.log(operands[0])
        if name == "max":
            known = {x.number: other for x, other in (operands, operands[::-1])}
            return known.get(-math.inf)
        if name in ("copy", "copy_p"):
            return operands[0]
        if name == "stop_gradient":
            return operands[0] if operands[0].mu else None
        if name == "is_finite":
            # If the largest logit is not finite, neither is lse, which replaces it.
            return True if operands[0].mu else None
        if name == "ge":
            return True if operands[0].is_positive and operands[1].number == 0 else None
        if name == "abs":
            return operands[0] if operands[0].is_positive else None
        if name == "sign":
            return lv.number(1) if operands[0].is_positive else None
        return None


def _number_of(x) -> float | None:
    """Return the number to which a value is equal everywhere, or None."""
    if isinstance(x, Full) and x.is_of_rows:
        x = x.gamma
    return x.number if isinstance(x, Row) else None
