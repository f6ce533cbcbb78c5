"""Rewrite pass that transposes gated products, so that the weights' dimension is last.

`jax.vmap` of a layer that multiplies its weights by a vector puts the weights' dimension before the
vectors' in the product, as in Equinox's layers without biases. A gated GEMM needs the weights as
columns. The pass transposes a product together with all arrays that elementwise equations connect
with it, but only where no data moves: every chain must end at products, whose operands and results
may have any layout.
"""

import collections
from collections.abc import Callable, Sequence

from jax.extend import core

from jax_tcgemm.epilogues.gate_up import find_gate_up
from jax_tcgemm.epilogues.membership import is_call, is_elementwise
from jax_tcgemm.passes.gates import by_columns, rows_and_columns
from jax_tcgemm.passes.transpositions import reading
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.system.jax_internals import has_plain_context, new_variable

# The most variables that are transposed together.
_MOST_TOGETHER = 256
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})


def with_transposed_gates(equations: Sequence[core.JaxprEqn], results) -> list[core.JaxprEqn]:
    """Return the equations of a program with such gated products transposed.

    Products must already be `dot_general_p` of this package.
    """
    equations = list(equations)
    alike = collections.defaultdict(list)
    cut = set()  # shapes of arrays that are sliced or split
    for number, eqn in enumerate(equations):
        if eqn.primitive.name in ("slice", "split"):
            cut.add(eqn.invars[0].aval.shape)
        if _is_free(eqn) and (found := by_columns(eqn)) is not None:
            (weights, shared), (out,) = found.invars, eqn.outvars
            alike[shared, weights.aval, out.aval].append(number)
    candidates = [
        (number, {equations[other].outvars[0] for other in numbers if other != number})
        for numbers in alike.values()
        for number in numbers
        if len(numbers) > 1 or equations[number].outvars[0].aval.shape in cut
    ]
    program = _Program(equations, results) if candidates else None
    done: set[core.Var] = set()
    for number, partners in candidates:
        (product,) = equations[number].outvars
        if product in done:
            continue
        rows, _ = rows_and_columns(equations[number])
        order = [dim for dim in range(product.aval.ndim) if dim not in rows] + rows
        is_stacked = program.splits_gate_up(product, rows)
        together = program.together(product, order) if is_stacked or partners else None
        if together is not None and (is_stacked or not together.isdisjoint(partners)):
            done |= together
            _transpose(equations, program, together, order)
    return equations


def _is_free(eqn: core.JaxprEqn) -> bool:
    """Return whether operands and result of a product may be transposed freely."""
    return (
        eqn.primitive is plain.dot_general_p
        and has_plain_context(eqn)
        and eqn.params["out_sharding"] is None
        and all(x.aval.sharding.mesh.empty for x in (*eqn.invars, *eqn.outvars))
    )


class _Program:
    """Program under analysis, with queries about which variables can be transposed."""

    def __init__(self, equations: Sequence[core.JaxprEqn], results):
        self.equations = equations
        self.made_by = {x: number for number, eqn in enumerate(equations) for x in eqn.outvars}
        self.users: dict[core.Var, list[int]] = collections.defaultdict(list)
        for number, eqn in enumerate(equations):
            for x in dict.fromkeys(x for x in eqn.invars if not isinstance(x, core.Literal)):
                self.users[x].append(number)
        self.results = {x for x in results if not isinstance(x, core.Literal)}

    def splits_gate_up(self, product: core.Var, rows: Sequence[int]) -> bool:
        """Return whether a product is split into gate and up along its rows."""

        def can_fuse(number: int) -> bool:
            eqn = self.equations[number]
            return is_elementwise(eqn, product.aval.shape) and not is_call(eqn)

        gate_up = find_gate_up(product, self.equations, self.users, can_fuse)
        return gate_up is not None and not gate_up.is_dropped and gate_up.dimension in rows

    def together(self, product: core.Var, order: Sequence[int]) -> set[core.Var] | None:
        """Return the variables to transpose together with a product; None if data would move."""
        found, waiting = {product}, [product]
        while waiting:
            x = waiting.pop()
            if x in self.results or x not in self.made_by or len(found) > _MOST_TOGETHER:
                return None
            for number in (self.made_by[x], *self.users[x]):
                others = _transposed_with(self.equations[number], x, order)
                if others is None:
                    return None
                waiting += others - found
                found |= others
        return found


def _transposed_with(eqn: core.JaxprEqn, x: core.Var, order: Sequence[int]) -> set[core.Var] | None:
    """Return the variables of an equation to transpose with `x`; None if that is impossible."""
    name, variables = eqn.primitive.name, (*eqn.invars, *eqn.outvars)
    if _is_free(eqn):
        return set()
    if eqn.effects or is_call(eqn) or not has_plain_context(eqn):
        return None
    if name in _REDUCTIONS and x in eqn.invars:
        kept = [dim for dim in order if dim not in eqn.params["axes"]]
        return set() if kept == sorted(kept) and eqn.params.get("out_sharding") is None else None
    if name == "broadcast_in_dim":
        return set() if x in eqn.outvars and eqn.invars[0].aval.shape == () else None
    if name not in _CHANGED and not is_elementwise(eqn, eqn.outvars[0].aval.shape):
        return None
    arrays = [y for y in variables if y.aval.ndim]
    are_alike = all(isinstance(y, core.Var) and y.aval.ndim == len(order) for y in arrays)
    is_unsharded = all(y.aval.sharding.mesh.empty for y in arrays)
    has_one_shape = name in _CHANGED or len({y.aval.shape for y in arrays}) == 1
    return set(arrays) if are_alike and is_unsharded and has_one_shape else None


# --- transposed equations -------------------------------------------------------------------------


def _transpose(equations: list, program: _Program, together: set[core.Var], order) -> None:
    """Replace the equations of variables by equations of the transposed variables."""
    inverse = [order.index(dim) for dim in range(len(order))]
    new = {x: new_variable(x, _moved(x.aval, order)) for x in together}
    for number in {n for x in together for n in (program.made_by[x], *program.users[x])}:
        eqn = equations[number]
        if _is_free(eqn):
            for side, x in enumerate(eqn.invars):
                if x in new:
                    eqn = reading(eqn, side, new[x], inverse)
            if eqn.outvars[0] in new:
                permutation = tuple(eqn.params["permutation"][dim] for dim in order)
                params = eqn.params | {"permutation": permutation}
                eqn = eqn.replace(outvars=[new[eqn.outvars[0]]], params=params)
        else:
            change = _CHANGED.get(eqn.primitive.name)
            invars = [x if isinstance(x, core.Literal) else new.get(x, x) for x in eqn.invars]
            outvars = [new.get(x, x) for x in eqn.outvars]
            params = eqn.params if change is None else eqn.params | change(eqn, order, inverse)
            eqn = eqn.replace(invars=invars, outvars=outvars, params=params)
        equations[number] = eqn


def _moved(aval, order):
    return aval.update(shape=tuple(aval.shape[dim] for dim in order))


def _each(*names: str) -> Callable:
    """Return the change of parameters that are None or have a value for each dimension."""

    def change(eqn, order, inverse):
        del inverse
        values = {name: eqn.params[name] for name in names}
        return {
            name: value if value is None else tuple(value[dim] for dim in order)
            for name, value in values.items()
        }

    return change


def _axis(name: str) -> Callable:
    """Return the change of a parameter that is a dimension."""
    return lambda eqn, order, inverse: {name: inverse[eqn.params[name]]}


def _axes(eqn, order, inverse) -> dict:
    del order
    return {"axes": tuple(sorted(inverse[dim] for dim in eqn.params["axes"]))}


# For primitives that are not elementwise, the change of their parameters.
_CHANGED: dict[str, Callable] = {
    "broadcast_in_dim": _each("shape"),
    "concatenate": _axis("dimension"),
    "pad": _each("padding_config"),
    "slice": _each("start_indices", "limit_indices", "strides"),
    "split": _axis("axis"),
    **dict.fromkeys(_REDUCTIONS, _axes),
}
