"""Pattern match of a model's head: the steps from a product to the logits of a loss.

    z = x w + bias
    z = soft_cap * tanh(z / soft_cap)

Bias and soft cap are both optional. Results of steps may be converted to a wider dtype, and the
dimensions of the tokens may be reshaped in between.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jax.extend import core
from jax.extend.core.primitives import mul_p

from jax_tcgemm.losses.how import Step
from jax_tcgemm.passes.gates import by_columns
from jax_tcgemm.passes.losses.values import NotALossError
from jax_tcgemm.system.jax_internals import has_plain_context

# Primitives that may change the shape and keep the row-major order of elements.
SHAPING = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
# Primitives that mark an array as varying over mesh axes of a shard_map and keep its values.
VARYING = frozenset({"pcast", "pvary"})


def as_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape folded to (rows, size of the last dimension)."""
    return math.prod(shape[:-1]), math.prod(shape[-1:])


@dataclasses.dataclass(frozen=True)
class Head:
    """Head of a model: a product, and the steps from it to the logits.

    Attributes:
      x: the features.
      w: the weights.
      vocabulary_axis: the dimension of w that is the vocabulary.
      logits: the result of the last step.
      bias: the bias, a variable with a number for each entry of the vocabulary; or None.
      soft_cap: the upper bound of the logits' magnitude; or None.
      tanh: the result of the soft cap's tanh; or None.
      steps: the steps that are present, each with the dtype of its result.
      made: the results of all steps and of conversions and reshapes between them.
    """

    x: core.Var
    w: core.Var
    vocabulary_axis: int
    logits: core.Var
    bias: core.Var | None
    soft_cap: float | None
    tanh: core.Var | None
    steps: tuple[tuple[Step, np.dtype], ...]
    made: frozenset[core.Var]

    def last_of(self, dtype) -> Step:
        """Return the last step whose result has a dtype; at least one must have it."""
        return max(step for step, own in self.steps if own == dtype)


def head_of(equations: Sequence[core.JaxprEqn], results: Sequence, product: core.Var) -> Head:
    """Return the head that begins with a product.

    Raises:
      NotALossError: where the product is not one of features and a matrix.
    """
    return _Steps(equations, results, product).head()


class _Steps:
    def __init__(self, equations, results, product: core.Var):
        self._made_by = {x: eqn for eqn in equations for x in eqn.outvars}
        self._users: dict[core.Var, list[core.JaxprEqn | None]] = {}
        for eqn in equations:
            for x in eqn.invars:
                if not isinstance(x, core.Literal):
                    self._users.setdefault(x, []).append(eqn)
        for x in results:
            if not isinstance(x, core.Literal):
                self._users.setdefault(x, []).append(None)
        self._rows, self._product = as_rows(product.aval.shape), product
        self._steps, self._made = [(Step.PRODUCT, product.aval.dtype)], [product]

    def head(self) -> Head:
        x, w, axis = _factors(self._made_by[self._product])
        bias, soft_cap, tanh = self._add_bias(), None, None
        if (capped := self._capped()) is not None:
            soft_cap, tanh = capped
        logits, steps, made = self._made[-1], tuple(self._steps), frozenset(self._made)
        return Head(x, w, axis, logits, bias, soft_cap, tanh, steps, made)

    def _next(self, x: core.Var, name: str) -> tuple[list[core.Var], core.JaxprEqn | None]:
        """Follow conversions and reshapes of a variable to the equation `name` that reads it.

        Returns:
          The converted and reshaped variables; and the equation, or None where the last variable
          has several readers or is read by another primitive.
        """
        converted: list[core.Var] = []
        while True:
            users = self._users.get(x, [])
            if len(users) != 1 or (eqn := users[0]) is None or not has_plain_context(eqn):
                return converted, None
            if len(eqn.outvars) != 1:
                return converted, None
            own, before, after = eqn.primitive.name, x.aval, eqn.outvars[0].aval
            if own == name and after.shape == before.shape:
                return converted, eqn
            widens = own == "convert_element_type" and after.dtype.itemsize > before.dtype.itemsize
            if not widens and not (own in SHAPING and as_rows(after.shape) == self._rows):
                return converted, None
            (x,) = eqn.outvars
            converted.append(x)

    def _add_bias(self) -> core.Var | None:
        converted, eqn = self._next(self._made[-1], "add")
        if eqn is None:
            return None
        before = (converted or self._made)[-1]
        other = eqn.invars[0 if eqn.invars[1] is before else 1]
        bias = None if isinstance(other, core.Literal) else self._vector(other)
        if bias is not None:
            self._take(Step.BIAS, converted, eqn)
        return bias

    def _capped(self) -> tuple[float, core.Var] | None:
        before = self._made[-1]
        for name in ("div", "mul"):
            converted, quotient = self._next(before, name)
            if quotient is None or (number := self._number(quotient)) is None or number == 0:
                continue
            more, tanh = self._next(quotient.outvars[0], "tanh")
            if tanh is None:
                continue
            by, (t,) = (number if name == "div" else 1 / number), tanh.outvars
            # Derivatives also read the tanh, but do not multiply it by a constant.
            products = (eqn for eqn in self._users.get(t, []) if eqn and eqn.primitive is mul_p)
            for eqn in products:
                soft_cap = self._number(eqn) or 0.0
                if soft_cap > 0 and math.isclose(soft_cap, by, rel_tol=1e-6):
                    self._take(Step.QUOTIENT, converted, quotient)
                    self._take(Step.TANH, more, tanh)
                    self._take(Step.CAP, [], eqn)
                    return soft_cap, t
        return None

    def _number(self, eqn: core.JaxprEqn) -> float | None:
        """Return the constant by which an equation multiplies or divides; None if not constant."""
        found = [self._literal(x) for x in eqn.invars]
        if eqn.primitive.name == "mul" and found[1] is None:
            found = found[::-1]
        return found[1] if found[0] is None else None

    def _literal(self, x) -> float | None:
        dtype = x.aval.dtype
        # In a shard_map, constants are marked as varying and then converted.
        while not isinstance(x, core.Literal) and (made := self._made_by.get(x)) is not None:
            if x.aval.shape or made.primitive.name not in (*VARYING, "convert_element_type"):
                return None
            (x,) = made.invars
        is_number = isinstance(x, core.Literal) and np.ndim(x.val) == 0
        return float(np.asarray(x.val).astype(dtype)) if is_number else None

    def _take(self, step: Step, converted: list[core.Var], eqn: core.JaxprEqn) -> None:
        (out,) = eqn.outvars
        self._steps.append((step, out.aval.dtype))
        self._made += [*converted, out]

    def _vector(self, x: core.Var) -> core.Var | None:
        """Return the vector over the vocabulary that is broadcast to `x`, or None."""
        size, found = self._rows[-1], None
        if x.aval.shape[-1:] != (size,):
            return None
        while True:
            if x.aval.size == size:
                found = x
            eqn = self._made_by.get(x)
            if eqn is None or eqn.primitive.name not in (*SHAPING, *VARYING):
                return found
            (before,) = eqn.invars
            if isinstance(before, core.Literal) or before.aval.size < size:
                return found
            if x.aval.size > size and not self._repeats_rows(eqn):
                return None
            x = before

    def _repeats_rows(self, eqn: core.JaxprEqn) -> bool:
        """Return whether an equation broadcasts a vector along its result's last dimension."""
        if eqn.primitive.name in VARYING:
            return True
        if eqn.primitive.name != "broadcast_in_dim":
            return False
        (before,), (after,) = eqn.invars, eqn.outvars
        places = tuple(eqn.params["broadcast_dimensions"])
        is_last = places[-1:] == (after.aval.ndim - 1,)
        return is_last and before.aval.shape[-1] == before.aval.size == self._rows[-1]


def _factors(eqn: core.JaxprEqn):
    """Return x, w and the vocabulary dimension of w, for the product of a head."""
    found = by_columns(eqn)
    if found is not None:
        x, w = found.invars
        (left, right), batch = found.params["dimension_numbers"]
        is_in_order = found.params["permutation"] == tuple(range(found.outvars[0].aval.ndim))
        if is_in_order and not any(batch) and w.aval.ndim == 2 and left == (x.aval.ndim - 1,):
            return x, w, 1 - right[0]
    raise NotALossError("a head's product must be of features and a matrix of the vocabulary")
