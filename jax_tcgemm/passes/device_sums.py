"""Sums over devices, `lax.psum`, as `all_reduce`s, for `accelerate`."""

from collections.abc import Iterator, Mapping, Sequence

from jax.extend import core

from jax_tcgemm.device import request
from jax_tcgemm.passes.other_products import OPTIONS
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives.all_reduce import product_of
from jax_tcgemm.selection.devices import target_device
from jax_tcgemm.sharding.all_reduce import all_reduce_p, parameters
from jax_tcgemm.system.jax_internals import has_plain_context, summed_axes


def with_all_reduces(equations: Sequence[core.JaxprEqn], results) -> list[core.JaxprEqn]:
    """Return the equations, with all-reduces in place of sums that a kernel computes on a GPU.

    These are sums of what is computed from products with a contracted dimension that is the last
    one of an operand, as in a layer: the next layer waits for them. XLA combines other sums, such
    as those of gradients, which no product waits for.
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
    plan = request.make_plan(product_of(x, params), target_device("cuda"))
    return eqn if plan.runs_by_xla else eqn.replace(primitive=all_reduce_p, params=params)


def _products(x, made_by: Mapping) -> Iterator[core.JaxprEqn]:
    """Yield the products that a variable is computed from, without a sum or product between."""
    left, seen = [x], set()
    while left:
        eqn = None if isinstance(x := left.pop(), core.Literal) else made_by.get(x)
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        if eqn.primitive is plain.dot_general_p:
            yield eqn
        elif not summed_axes(eqn) and eqn.primitive is not all_reduce_p:
            left.extend(eqn.invars)


def _sums_rows(eqn: core.JaxprEqn) -> bool:
    """Return whether no contracted dimension is the last one of an operand."""
    (contracted, _) = eqn.params["dimension_numbers"]
    return not any(
        x.aval.ndim - 1 in axes for x, axes in zip(eqn.invars[:2], contracted, strict=True)
    )
