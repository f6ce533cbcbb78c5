"""Sums over devices, `lax.psum`, as `all_reduce`s, for `accelerate`."""

from collections.abc import Sequence

from jax.extend import core

from jax_tcgemm.device import request
from jax_tcgemm.passes.other_products import OPTIONS
from jax_tcgemm.primitives.all_reduce import product_of
from jax_tcgemm.selection.devices import target_device
from jax_tcgemm.sharding.all_reduce import all_reduce_p, parameters
from jax_tcgemm.system.jax_internals import has_plain_context, summed_axes


def with_all_reduces(equations: Sequence[core.JaxprEqn], results) -> list[core.JaxprEqn]:
    """Return the equations, with all-reduces in place of sums that a kernel computes on a GPU."""
    del results
    return [_as_all_reduce(eqn) for eqn in equations]


def _as_all_reduce(eqn: core.JaxprEqn) -> core.JaxprEqn:
    axes = summed_axes(eqn)
    if not axes or len(eqn.invars) != 1 or not has_plain_context(eqn):
        return eqn
    x = eqn.invars[0].aval
    axis_sizes = x.sharding.mesh.shape
    if not axis_sizes.keys() >= set(axes):
        return eqn
    params = parameters(axes, axis_sizes, OPTIONS)
    plan = request.make_plan(product_of(x, params), target_device("cuda"))
    return eqn if plan.runs_by_xla else eqn.replace(primitive=all_reduce_p, params=params)
