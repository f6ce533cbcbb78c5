"""Rewrite pass for products with a symmetric result, of which kernels compute half.

A product of an array by its own transpose is symmetric, and so are elementwise results of symmetric
matrices. Polynomials of one symmetric matrix commute, so that their products are also symmetric.
Such a product is rewritten with the transpose of its right operand, which has the same value:
kernels recognize a symmetric result by this layout (device/dense/product.py).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm.epilogues.membership import is_elementwise
from jax_tcgemm.passes.transpositions import is_transposition
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.system.jax_internals import as_jaxpr

# Two dimensions of a variable.
Pair = frozenset[int]


class Symmetric(NamedTuple):
    """Symmetry of a variable.

    Attributes:
      pair: the two dimensions that can be exchanged.
      base: the variable of which the matrices are polynomials.
    """

    pair: Pair
    base: core.Var


# Primitives whose results are polynomials of a matrix where their operands are: sums of matrices,
# and multiples by a number.
_SUMS = frozenset({"add", "sub", "neg", "add_any", "convert_element_type", "copy"})
_MULTIPLES = frozenset({"mul", "div"})


def with_grams(equations: Sequence[core.JaxprEqn]) -> list[core.JaxprEqn]:
    """Return the equations with products of a symmetric matrix by itself as Gram matrices."""
    program = _Program()
    return [program.add(eqn) for eqn in equations]


def symmetric_variables(equations: Sequence[core.JaxprEqn]) -> Mapping[core.Var, Symmetric]:
    """Return the symmetric variables of a program, with their symmetry."""
    program = _Program()
    for eqn in equations:
        program.add(eqn)
    return program.known


def keeps_symmetry(
    function: core.ClosedJaxpr,
    inputs: Sequence,
    product: core.Var,
    known: Mapping[core.Var, Symmetric],
) -> bool:
    """Return whether an elementwise function of a product and of inputs has symmetric results.

    The product must be symmetric, each input symmetric or constant over a matrix, and the function
    must not use the indices of elements.
    """
    if product not in known or _uses_indices(function):
        return False
    shape, pair = product.aval.shape, known[product].pair

    def is_kept(x) -> bool:
        input_shape = x.aval.shape
        if len(input_shape) == len(shape) and all(input_shape[axis] == 1 for axis in pair):
            return True
        is_symmetric = isinstance(x, core.Var) and x in known and known[x].pair == pair
        return input_shape == () or (is_symmetric and input_shape == shape)

    return all(map(is_kept, inputs))


def _uses_indices(x) -> bool:
    jaxpr = as_jaxpr(x)
    inner = (value for eqn in jaxpr.eqns for value in eqn.params.values())
    return any(eqn.primitive.name == "iota" for eqn in jaxpr.eqns) or any(
        _uses_indices(value) for value in inner if as_jaxpr(value) is not None
    )


class _Program:
    """Program under analysis: the symmetry of the results of the equations added so far."""

    def __init__(self):
        self.known: dict[core.Var, Symmetric] = {}
        # Of results of broadcasts, the dimensions along which all elements are the same.
        self._constant: dict[core.Var, Pair] = {}

    def add(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        """Add an equation; return it, or its replacement of which kernels compute half."""
        if eqn.primitive is plain.dot_general_p:
            eqn = self._add_product(eqn)
        elif is_transposition(eqn):
            if (found := self._of(eqn.invars[0])) is not None:
                order = list(eqn.params["permutation"])
                self._note(eqn, frozenset(order.index(axis) for axis in found.pair))
        elif eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1:
            kept = eqn.params["broadcast_dimensions"]
            every = range(eqn.outvars[0].aval.ndim)
            self._constant[eqn.outvars[0]] = frozenset(axis for axis in every if axis not in kept)
        else:
            self._add_elementwise(eqn)
        return eqn

    def _add_elementwise(self, eqn: core.JaxprEqn) -> None:
        found = [self._of(x) for x in eqn.invars]
        pairs = {x.pair for x in found if x is not None}
        # Most programs have no symmetric matrices, so that the slower checks come last.
        if len(pairs) != 1 or not is_elementwise(eqn, eqn.outvars[0].aval.shape):
            return
        (pair,) = pairs
        others = [x for x, own in zip(eqn.invars, found, strict=True) if own is None]
        if all(self._is_constant(x, pair) for x in others):
            self._note(eqn, pair, _base_of(eqn, found))

    def _is_constant(self, x, pair: Pair) -> bool:
        is_scalar = x.aval.shape == ()
        return is_scalar or (isinstance(x, core.Var) and pair <= self._constant.get(x, frozenset()))

    def _of(self, x) -> Symmetric | None:
        return self.known.get(x) if isinstance(x, core.Var) else None

    def _note(self, eqn: core.JaxprEqn, pair: Pair, base: core.Var | None = None) -> None:
        for x in eqn.outvars:
            self.known[x] = Symmetric(pair, base or x)

    def _add_product(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        lhs, rhs = eqn.invars
        contract, batch = eqn.params["dimension_numbers"]
        left, right = self._of(lhs), self._of(rhs)
        commute = left is not None and left == right and batch[0] == batch[1]
        if commute and {*contract[0], *contract[1]} <= left.pair and len(contract[0]) == 1:
            numbers = ((contract[0], contract[0]), batch)
            eqn = eqn.replace(params=eqn.params | {"dimension_numbers": numbers})
        elif not (lhs is rhs and contract[0] == contract[1] and batch[0] == batch[1]):
            return eqn
        if (pair := _rows_and_columns(eqn)) is not None:
            self._note(eqn, pair, left.base if commute else None)
        return eqn


def _base_of(eqn: core.JaxprEqn, found: Sequence[Symmetric | None]) -> core.Var | None:
    """Return the base of which an equation's results are polynomials, or None.

    `found` has the symmetry of each operand, or None.
    """
    bases, out = {x.base for x in found if x is not None}, eqn.outvars[0].aval.dtype
    # Results rounded to integers or to a narrower dtype do not commute with the matrix.
    is_rounded = any(jnp.promote_types(x.aval.dtype, out) != out for x in eqn.invars)
    if len(bases) != 1 or is_rounded or not jnp.issubdtype(out, np.inexact):
        return None
    name, number = eqn.primitive.name, sum(x is not None for x in found)
    # A scalar added to every element of a matrix is not a polynomial of the matrix.
    is_sum = name in _SUMS and number == len(found)
    is_multiple = name in _MULTIPLES and number == 1 and (name == "mul" or found[0] is not None)
    return bases.pop() if is_sum or is_multiple else None


def _rows_and_columns(eqn: core.JaxprEqn) -> Pair | None:
    """Return the row and the column dimension of a product; None if there are several of either."""
    contract, batch = eqn.params["dimension_numbers"]
    num_batch = len(batch[0])
    if eqn.invars[0].aval.ndim != num_batch + len(contract[0]) + 1:
        return None
    return frozenset(eqn.params["permutation"].index(num_batch + side) for side in (0, 1))
