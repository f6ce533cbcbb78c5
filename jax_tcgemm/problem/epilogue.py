"""Epilogue of a GEMM, the mirror of csrc/core/problem.h."""

import dataclasses

from jax_tcgemm.problem.function import Function, attributes_of


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """Epilogue of a GEMM; `Epilogue()` is none: D = alpha * op(A) op(B) + beta * C.

    Attributes:
      gated: whether the GEMM is gated: it has two matrices B, gate and up, of one layout and equal
        strides, and `function` takes both accumulators.
      up_offset: elements from gate to up in one array; 0 when up is an operand of its own after
        `b`.
      function: the function from accumulators to D and further results; None for none.
    """

    gated: bool = False
    up_offset: int = 0
    function: Function | None = None

    def attributes(self) -> dict:
        """Return the epilogue's fields of the FFI attribute `gemm` (csrc/core/problem.h)."""
        attributes = {"gated": self.gated, "up_offset": self.up_offset}
        return attributes | attributes_of(self.function)

    def __str__(self) -> str:
        """Return a short description; "" without an epilogue."""
        words = ["gated"] if self.gated else []
        return " ".join([*words, self.function.name] if self.function else words)


BARE = Epilogue()
