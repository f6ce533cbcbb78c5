"""The plan of a call that is one problem or XLA's: what to say, and what is chosen.

As in dense/plan.py, `make_plan` decides everything from shapes and dtypes; rows.py,
fusion/packed.py, quantize.py and split_precision.py carry plans out, and `explain` prints them.
"""

import dataclasses

from jax_tcgemm import selection
from jax_tcgemm.device.plan import BasePlan
from jax_tcgemm.problem.all_reduce import AllReduceProblem
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.operands.packed import PackedProblem
from jax_tcgemm.problem.operands.quantize import QuantizeProblem
from jax_tcgemm.problem.rows import RowsProblem
from jax_tcgemm.problem.split import SplitProblem

AnyProblem = RowsProblem | PackedProblem | QuantizeProblem | SplitProblem | AllReduceProblem


@dataclasses.dataclass(frozen=True)
class Request:
    """One call of a primitive, as its planner takes it.

    Attributes:
      kind: of what kind of problems it is, as `Problem.kind`.
      options: options of the call.
      problem: the problem; or a phrase saying why there is none.
    """

    kind: str
    options: CallOptions
    problem: AnyProblem | str


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """How it runs on one device. `problem` is None where XLA is all there is."""

    platform: str
    problem: AnyProblem | None
    choice: selection.Choice


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
        request.options, problem, device, kind=request.kind, obstacle=obstacle
    )
    return Plan(device.platform, problem, choice)
