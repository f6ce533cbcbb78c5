"""Selection of the implementation and config that run a problem."""

from jax_tcgemm.selection.choice import (
    Choice,
    forget,
    is_forced,
    obstacle_of,
    reason_to_stay,
    select,
)
from jax_tcgemm.selection.contraction_cost import AsProduct
from jax_tcgemm.selection.cost_model.calibration import calibration_of
from jax_tcgemm.selection.cost_model.loops import loop_us
from jax_tcgemm.selection.devices import ASSUMED_GPU, Device, default_device, target_device
from jax_tcgemm.selection.estimates import estimated_us, xla_us
from jax_tcgemm.selection.implementations import (
    IMPLEMENTATIONS,
    IMPLEMENTATIONS_OF,
    XLA,
    AnyProblem,
    Candidate,
    abi_of,
    check_names,
    listed,
    may_be_unfused,
)
from jax_tcgemm.selection.observation import collect, is_unseen, lowering, set_measurer, unseen
from jax_tcgemm.selection.operations import select_operation
from jax_tcgemm.selection.ranking import gain_of_converting, predicted, predicted_us, ranked

__all__ = [
    "ASSUMED_GPU",
    "IMPLEMENTATIONS",
    "IMPLEMENTATIONS_OF",
    "XLA",
    "AnyProblem",
    "AsProduct",
    "Candidate",
    "Choice",
    "Device",
    "abi_of",
    "calibration_of",
    "check_names",
    "collect",
    "default_device",
    "estimated_us",
    "forget",
    "gain_of_converting",
    "is_forced",
    "is_unseen",
    "listed",
    "loop_us",
    "lowering",
    "may_be_unfused",
    "obstacle_of",
    "predicted",
    "predicted_us",
    "ranked",
    "reason_to_stay",
    "select",
    "select_operation",
    "set_measurer",
    "target_device",
    "unseen",
    "xla_us",
]
