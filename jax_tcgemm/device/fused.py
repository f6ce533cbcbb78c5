"""Plans of calls with an epilogue: one call of an implementation, or unfused.

An unfused call runs its products by plans of their own, and XLA computes the rest.
"""

from jax_tcgemm import selection
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.function import Function

# Dtypes that stand for a D of another dtype, by their size.
_CARRIERS = {1: "u8", 4: "s32", 8: "f64"}


class Fusible:
    """Plan that is one call, or unfused.

    Attributes:
      problem: the problem of the one call; None or any if the call is unfused.
      choice: what runs it; "xla" is unfused.
    """

    problem: selection.AnyProblem | None
    choice: selection.Choice

    @property
    def is_fused(self) -> bool:
        """Whether one call runs it."""
        return self.choice.implementation != selection.XLA

    @property
    def code(self) -> str:
        """The generated code of the epilogue, "" if no kernel is compiled with it."""
        is_ours = self.is_fused and self.choice.implementation != "cublaslt"
        function = self.problem.function if is_ours else None
        return function.definitions if function else ""


def unfused(why: str) -> selection.Choice:
    """Return the choice of an unfused call."""
    return selection.Choice(selection.XLA, "default", f"unfused: {why}")


def refuse_to_fuse(options: CallOptions, device: selection.Device, kind: str, why: str):
    """Return the choice of a call that cannot be fused.

    Raises:
      ValueError: if an implementation was asked for by name.
    """
    if not selection.may_be_unfused(options):
        selection.select(options, None, device, kind=kind, obstacle=why)
    return unfused(why)


def runs_on_cpu_by_xla(options: CallOptions, device: selection.Device) -> bool:
    """Whether XLA computes the epilogue because no implementation does on the device."""
    may_be = selection.may_be_unfused(options) or options.implementation == "host"
    return device.platform == "cpu" and may_be


def out_dtype_of(function: Function) -> str | None:
    """Return the name of the dtype of D, or of a dtype of its size; None if there is neither."""
    dtype = function.results[0].dtype
    return DTYPE_NAMES.get(dtype) or _CARRIERS.get(dtype.itemsize)
