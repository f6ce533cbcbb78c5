"""Which implementation and config runs a problem."""

from jax_tcgemm.selection.choice import (
    ACCELERATE,
    DEQUANTISED,
    Choice,
    collect,
    dequantized_operands,
    forget,
    is_forced,
    is_unseen,
    obstacle_of,
    predicted_us,
    ranked,
    reason_to_stay,
    select,
    unseen,
)
from jax_tcgemm.selection.contraction_cost import AsProduct
from jax_tcgemm.selection.cost_model import loop_us
from jax_tcgemm.selection.devices import ASSUMED_GPU, Device, target_device
from jax_tcgemm.selection.implementations import (
    IMPLEMENTATIONS,
    IMPLEMENTATIONS_OF,
    XLA,
    AnyProblem,
    Candidate,
    abi_of,
    check_names,
    for_any_rows,
    listed,
    may_be_unfused,
    nominal_rows,
)
from jax_tcgemm.selection.operations import select_operation

__all__ = [
    "ACCELERATE",
    "ASSUMED_GPU",
    "DEQUANTISED",
    "IMPLEMENTATIONS",
    "IMPLEMENTATIONS_OF",
    "XLA",
    "AnyProblem",
    "AsProduct",
    "Candidate",
    "Choice",
    "Device",
    "abi_of",
    "check_names",
    "collect",
    "dequantized_operands",
    "for_any_rows",
    "forget",
    "is_forced",
    "is_unseen",
    "listed",
    "loop_us",
    "may_be_unfused",
    "nominal_rows",
    "obstacle_of",
    "predicted_us",
    "ranked",
    "reason_to_stay",
    "select",
    "select_operation",
    "target_device",
    "unseen",
]
