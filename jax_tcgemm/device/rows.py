"""Sums and products of rows on one device: choose, then call.

As in dense.py, `make_plan` decides everything from shapes and dtypes, `sums` and `dots` carry a
plan out and `explain` prints one.
"""

import dataclasses

import jax

from jax_tcgemm import selection
from jax_tcgemm.device.call import call
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.rows import RowsProblem


@dataclasses.dataclass(frozen=True)
class Request:
    """What one call of the primitive says (primitives/rows.py).

    Attributes:
      op: the public function, for messages.
      problem: the problem; or a phrase saying why there is none.
      implementation: name to force, or None.
    """

    op: str
    problem: RowsProblem | str
    implementation: str | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How it runs on one device. `problem` is None where XLA is all there is."""

    problem: RowsProblem | None
    choice: selection.Choice
    copies: tuple[str, ...] = ()


def make_plan(request: Request, device: selection.Device, obstacle: str = "") -> Plan:
    """Chooses what runs a call.

    Args:
      request: the call.
      device: the device it will run on.
      obstacle: a phrase saying why only XLA can run it; "" when not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run it.
    """
    problem = obstacle or request.problem
    if isinstance(problem, str):
        problem, obstacle = None, problem
    choice = selection.select(
        request.op, problem, device, request.implementation, kind="rows", obstacle=obstacle
    )
    return Plan(problem, choice)


def sums(a, indices, starts, weights=None, *, plan: Plan) -> jax.Array:
    """The custom call of form sums, its pairs sorted by target."""
    operands = [a, indices, starts]
    if weights is not None:
        operands.append(weights.astype(DTYPES[plan.problem.compute]))
    return _call(plan, operands, (plan.problem.targets, plan.problem.n))


def dots(a, b, indices, b_indices, *, plan: Plan) -> jax.Array:
    """The custom call of form dots."""
    return _call(plan, [a, b, indices, b_indices], (plan.problem.pairs,))


def _call(plan: Plan, operands, shape) -> jax.Array:
    result = jax.ShapeDtypeStruct(shape, DTYPES[plan.problem.out_dtype])
    return call(plan.problem, plan.choice, operands, [result])[0]
