"""Writing of the program that replaces a loss."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jax_tcgemm.passes.losses.values import NotALossError
from jax_tcgemm.passes.programs import traced
from jax_tcgemm.system.jax_internals import as_jaxpr, new_variable, varying_axes


class Writer:
    """Equations of the new program.

    Attributes:
      written: the equations.
      made_by: the equation of each variable that an equation computes.
    """

    def __init__(self, tokens: tuple[int, ...], dtype, mesh, *, varies: bool):
        """Start a program without equations.

        Args:
          tokens: the shape of a row, which has a value for each token.
          dtype: the dtype of rows that are constants.
          mesh: the mesh of all values.
          varies: whether values may vary over the mesh axes of a shard_map.
        """
        self._tokens, self._dtype, self._mesh, self._varies = tokens, dtype, mesh, varies
        self._reshaped: dict[tuple[core.Var, tuple[int, ...]], core.Var] = {}
        self.made_by: dict[core.Var, core.JaxprEqn] = {}
        self.written: list[core.JaxprEqn] = []

    def is_row(self, shape: tuple[int, ...]) -> bool:
        """Return whether a shape has one element for each token."""
        return math.prod(shape) == math.prod(self._tokens)

    def keep(self, eqn: core.JaxprEqn) -> None:
        """Append an equation."""
        self.written.append(eqn)
        self.made_by |= dict.fromkeys(eqn.outvars, eqn)

    def of_shape(self, row: core.Var, shape: tuple[int, ...]) -> core.Var:
        """Return a row with another shape, which is written once for each shape."""
        if row.aval.shape == shape:
            return row
        if (row, shape) not in self._reshaped:
            (made,) = self.emitted(lambda x: (x.reshape(shape),), row)
            self._reshaped[row, shape] = made
        return self._reshaped[row, shape]

    def varying_as(self, x: core.Var, value: core.Var) -> core.Var:
        """Return `value`, made to vary over the mesh axes of a shard_map over which `x` varies."""
        wanted, axes_of_value = varying_axes(x.aval), varying_axes(value.aval)
        if axes_of_value - wanted:
            raise NotALossError("what is computed of it must vary as its logits do")
        axes = tuple(wanted - axes_of_value)
        if not axes:
            return value
        return self.emitted(lambda v: (lax.pcast(v, axes, to="varying"),), value)[0]

    def emit(self, function: Callable, *operands: core.Var) -> core.Var:
        """Append the equations of a function of rows to the program; return its result, a row."""

        def row(*given):
            out = jnp.asarray(function(*given), None if given else self._dtype)
            return (out if out.shape == self._tokens else jnp.full(self._tokens, out),)

        return self.emitted(row, *operands)[0]

    def emitted(self, function: Callable, *operands: core.Var, results=None) -> list[core.Var]:
        """Append the equations of a function of variables, with `results` for its results."""
        types = [x.aval for x in operands]
        closed = traced(function, types, self._mesh, varies=self._varies)
        jaxpr = as_jaxpr(closed)
        if closed.consts:
            raise NotALossError("what it is made of must close over no arrays")
        for x, result in zip(jaxpr.outvars, results or (), strict=False):
            if varying_axes(x.aval) != varying_axes(result.aval):
                raise NotALossError("labels and what gradients are of must vary as its logits do")
        written = dict(zip(jaxpr.invars, operands, strict=True))
        given = dict(zip(jaxpr.outvars, results or (), strict=False))
        for eqn in jaxpr.eqns:
            written |= {x: given.get(x) or new_variable(x) for x in eqn.outvars}
            invars = [x if isinstance(x, core.Literal) else written[x] for x in eqn.invars]
            self.keep(eqn.replace(invars=invars, outvars=[written[x] for x in eqn.outvars]))
        return [written[x] for x in jaxpr.outvars]

    def computed_from(self, *sources: core.Var) -> set[core.Var]:
        """Return variables and everything that is computed from any of them."""
        found = set(sources)
        for eqn in self.written:
            if not found.isdisjoint(x for x in eqn.invars if not isinstance(x, core.Literal)):
                found.update(eqn.outvars)
        return found
