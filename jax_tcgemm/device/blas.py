"""The device-local BLAS call: choose what runs it, call.

As in dense/plan.py, `make_plan` decides everything from shapes and dtypes, `run` carries a plan out
and `explain` prints one.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm import selection
from jax_tcgemm.device import blas_reference as reference
from jax_tcgemm.device.call import call as custom_call
from jax_tcgemm.device.plan import BasePlan
from jax_tcgemm.problem.blas.call import Call, batch_shape, scale_dtype
from jax_tcgemm.problem.blas.problem import BlasProblem
from jax_tcgemm.problem.call_options import CallOptions


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """How one BLAS call runs on one device."""

    problem: BlasProblem
    choice: selection.Choice

    @property
    def copies(self) -> tuple[str, ...]:
        """Every array that has to be repeated for the call, in words."""
        if self.runs_by_xla:
            return ()
        batch = self.problem.batch
        inputs, c, _ = self.problem.call.split(self.problem.shapes)
        repeated = [
            shape
            for group in inputs
            if any(math.prod(shape[: len(batch)]) > 1 for shape in group)
            for shape in group
        ]
        return tuple(
            f"array of {shape} repeated over the batch {batch}"
            for shape in (*repeated, *(c or ()))
            if shape[: len(batch)] != batch
        )


def make_plan(problem: BlasProblem, device: selection.Device, obstacle: str = "") -> Plan:
    """Chooses what runs a call.

    Args:
      problem: the call and its shapes.
      device: the device it will run on.
      obstacle: a phrase saying why only XLA can run it; "" when it need not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run the call.
    """
    call = problem.call
    options = CallOptions(call.op, call.implementation)
    choice = selection.select(options, problem, device, obstacle=obstacle)
    return Plan(problem, choice)


def run(call: Call, *operands, plan: Plan, types: Sequence) -> list:
    """Carries out a plan: the call's results, whose shapes and dtypes are `types`."""
    if plan.runs_by_xla:
        return reference.run(call, *operands)
    batch = batch_shape(call, [x.shape for x in operands])
    inputs, c, scalars = call.split(operands)
    flat = [x for group in inputs for x in _with_batch(group, batch)]
    # In place, every entry of the batch is there.
    c = c and tuple(_repeat(x, batch) for x in c)
    first_c = len(flat)
    flat += list(c or ())
    if scalars is not None:
        dtype = scale_dtype(flat[0].dtype)
        flat += [lax.convert_element_type(x.reshape(()), dtype) for x in scalars]
    results = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in types]
    aliases = {first_c + i: i for i in range(call.items)} if c else None
    found = custom_call(plan.problem, plan.choice, flat, results, aliases)
    if call.routine in ("iamax", "iamin"):
        return [found[0] - 1]  # BLAS counts from 1.
    return found


def _with_batch(group, batch):
    """Arrays with all of the batch, or with none of it: what one batch stride can say."""
    if all(math.prod(x.shape[: len(batch)]) == 1 for x in group):
        return group
    return [_repeat(x, batch) for x in group]


def _repeat(x, batch):
    return jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :]))
