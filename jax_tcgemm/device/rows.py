"""Sums and products of rows on one device: choose, then call.

As in dense.py, `make_plan` decides everything from shapes and dtypes, `sums` and `dots` carry a
plan out and `explain` prints one.
"""

import dataclasses

import jax

from jax_tcgemm import selection
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.rows import RowsProblem
from jax_tcgemm.system import modules

TARGET = "tcgemm_rows"


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


def make_plan(
    request: Request, platform: str, device: selection.Device, obstacle: str = ""
) -> Plan:
    """Chooses what runs a call.

    Args:
      request: the call.
      platform: the platform it is lowered for.
      device: the device it will run on.
      obstacle: a phrase saying why only XLA can run it; "" when not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run it.
    """
    del platform
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
    problem, choice = plan.problem, plan.choice
    module = modules.cpu if choice.implementation == "host" else modules.cuda
    result = jax.ShapeDtypeStruct(shape, DTYPES[problem.out_dtype])
    rows = {
        "abi": module.abi_version,
        "implementation": choice.implementation,
        "config": choice.config,
    }
    return jax.ffi.ffi_call(TARGET, result)(*operands, rows=rows | problem.attributes())
