"""Search for arrays of a program whose exponential or argmax is taken, as the logits of a loss.

Matching the logits of a loss takes a walk through the whole program, and most products of a model
are no logits. This search selects the few candidates for `values` from the equations that
follow each product.
"""

import collections
from collections.abc import Collection, Sequence

from jax.extend import core

from jax_tcgemm.epilogues.calls import called
from jax_tcgemm.passes.losses.heads import SHAPING, as_rows
from jax_tcgemm.system.jax_internals import as_jaxpr

# Primitives between a product and its exponential: a conversion, a bias, a soft cap, reshaped
# tokens, and the subtraction of the largest logit or of another number for each token.
_BETWEEN = frozenset(
    {"add", "add_any", "sub", "mul", "div", "neg", "tanh"}
    | {"convert_element_type", "stop_gradient", "pvary", "pcast"}
    | SHAPING
)


def exponentiated(
    equations: Sequence[core.JaxprEqn], arrays: Collection[core.Var]
) -> set[core.Var]:
    """Return the arrays whose exponential or argmax is taken, up to a number added to each row.

    Args:
      equations: the program.
      arrays: candidates, variables of the program.
    """
    shapes = {as_rows(x.aval.shape) for x in arrays}
    users = collections.defaultdict(list)
    repeated = set()
    for eqn in equations:
        for x in eqn.invars:
            if not isinstance(x, core.Literal) and as_rows(x.aval.shape) in shapes:
                users[x].append(eqn)
        if eqn.primitive.name == "broadcast_in_dim":
            repeated.update(eqn.outvars)

    def is_exponentiated(array: core.Var) -> bool:
        known, waiting = {array}, [array]
        while waiting:
            for eqn in users.get(waiting.pop(), ()):
                found = _followed(eqn, known, repeated, as_rows(array.aval.shape))
                if found is None:
                    return True
                waiting += found - known
                known |= found
        return False

    return set(filter(is_exponentiated, arrays))


def _followed(eqn: core.JaxprEqn, known, repeated, rows) -> set[core.Var] | None:
    """Return the results that derive from a known array; None if its exp or argmax is taken."""
    are_known = [not isinstance(x, core.Literal) and x in known for x in eqn.invars]
    if not any(are_known):
        return set()
    name, inner = eqn.primitive.name, as_jaxpr(called(eqn))
    if name in ("exp", "argmax"):
        return None
    if inner is not None:
        inner_known = {x for x, is_known in zip(inner.invars, are_known, strict=True) if is_known}
        inner_repeated = set()
        for inner_eqn in inner.eqns:
            if inner_eqn.primitive.name == "broadcast_in_dim":
                inner_repeated.update(inner_eqn.outvars)
            found = _followed(inner_eqn, inner_known, inner_repeated, rows)
            if found is None:
                return None
            inner_known |= found
        outs = zip(eqn.outvars, inner.outvars, strict=True)
        return {x for x, y in outs if not isinstance(y, core.Literal) and y in inner_known}
    if name not in _BETWEEN or as_rows(eqn.outvars[0].aval.shape) != rows:
        return set()
    # Other operands of the logits' shape must be broadcast from smaller arrays.
    are_rows = all(
        is_known or isinstance(x, core.Literal) or as_rows(x.aval.shape) != rows or x in repeated
        for x, is_known in zip(eqn.invars, are_known, strict=True)
    )
    return set(eqn.outvars) if are_rows else set()
