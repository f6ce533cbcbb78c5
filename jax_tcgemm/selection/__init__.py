"""Which implementation and config runs a problem."""

from jax_tcgemm.selection.choice import (
    ASSUMED_GPU,
    IMPLEMENTATIONS,
    XLA,
    AnyProblem,
    Candidate,
    Choice,
    Device,
    abi_of,
    check_names,
    collect,
    forget,
    listed,
    ranked,
    select,
    target_device,
)

__all__ = [
    "ASSUMED_GPU",
    "IMPLEMENTATIONS",
    "XLA",
    "AnyProblem",
    "Candidate",
    "Choice",
    "Device",
    "abi_of",
    "check_names",
    "collect",
    "forget",
    "listed",
    "ranked",
    "select",
    "target_device",
]
