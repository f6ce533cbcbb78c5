"""The base of all plans: what runs one call, and what `explain` says of it."""

from jax_tcgemm import selection


class BasePlan:
    """How one call runs on one device.

    Attributes:
      problem: what an implementation computes; None if there is nothing but XLA's program.
      choice: what runs the call.
      copies: every array that XLA must rewrite for the call, in words.
      code: the device code that is generated for the call; "" without any.
    """

    problem: selection.AnyProblem | None
    choice: selection.Choice
    copies: tuple[str, ...] = ()
    code: str = ""

    @property
    def runs_by_xla(self) -> bool:
        """Whether XLA runs the call, and no implementation."""
        return self.choice.implementation == selection.XLA

    def xla_us(self, device: selection.Device) -> float | None:
        """Return the estimated time of XLA's program in place of the call; None without any."""
        return selection.xla_us(self.problem, device)
