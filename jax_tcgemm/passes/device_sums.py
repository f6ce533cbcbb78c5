"""Sums over devices, `lax.psum`, as `all_reduce`s, for `accelerate`."""

from collections.abc import Iterator, Mapping, Sequence

from jax.extend import core
from jax.extend.core.primitives import dot_general_p

from jax_tcgemm import selection
from jax_tcgemm.device import request
from jax_tcgemm.epilogues.calls import called
from jax_tcgemm.epilogues.membership import is_elementwise
from jax_tcgemm.passes.other_products import OPTIONS
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives.all_reduce import product_of
from jax_tcgemm.primitives.epilogue_product import epilogue_product_p
from jax_tcgemm.sharding.all_reduce import all_reduce_p, parameters
from jax_tcgemm.system.jax_internals import as_jaxpr, has_plain_context, summed_axes

# Primitives whose result has the elements of their operand.
_RESHAPES = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "slice"})


def with_all_reduces(equations: Sequence[core.JaxprEqn], results) -> list[core.JaxprEqn]:
    """Return the equations, with all-reduces in place of sums that a kernel computes on a GPU.

    These are sums of products, and of elementwise functions of products, for which the next layer
    waits. XLA combines the sums of weight gradients; see `Division.sums_rows`.
    """
    del results
    made_by = {x: eqn for eqn in equations for x in eqn.outvars}
    return [_as_all_reduce(eqn, made_by) for eqn in equations]


def _as_all_reduce(eqn: core.JaxprEqn, made_by: Mapping) -> core.JaxprEqn:
    axes = summed_axes(eqn)
    if not axes or len(eqn.invars) != 1 or not has_plain_context(eqn):
        return eqn
    x = eqn.invars[0].aval
    axis_sizes = x.sharding.mesh.shape
    products = list(_products(eqn.invars[0], made_by))
    if not products or any(map(_sums_rows, products)) or not axis_sizes.keys() >= set(axes):
        return eqn
    params = parameters(axes, axis_sizes, OPTIONS)
    with selection.unseen():
        plan = request.make_plan(product_of(x, params), selection.target_device("cuda"))
    return eqn if plan.runs_by_xla else eqn.replace(primitive=all_reduce_p, params=params)


def _products(x, made_by: Mapping) -> Iterator[core.JaxprEqn]:
    """Yield the products that a variable is an elementwise function of, also in inner jaxprs."""
    left, seen = [x], set()
    while left:
        eqn = None if isinstance(x := left.pop(), core.Literal) else made_by.get(x)
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        if _is_product(eqn):
            yield eqn
        elif inner := as_jaxpr(called(eqn)):
            of_inner = {x: e for e in inner.eqns for x in e.outvars}
            yield from _products(inner.outvars[eqn.outvars.index(x)], of_inner)
        elif eqn.primitive.name in _RESHAPES or is_elementwise(eqn, x.aval.shape):
            left.extend(eqn.invars)


def _is_product(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive in (plain.dot_general_p, dot_general_p, epilogue_product_p)


def _sums_rows(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive is epilogue_product_p:
        return False
    lhs, rhs = (x.aval for x in eqn.invars[:2])
    permutation = eqn.params.get("permutation", tuple(range(eqn.outvars[0].aval.ndim)))
    params = {"dimension_numbers": eqn.params["dimension_numbers"], "permutation": permutation}
    division = plain.division_of(lhs, rhs, params)
    return division.sums_rows(division.contracted)
