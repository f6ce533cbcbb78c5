"""What happens to a product before it is stored, as the C++ side knows it (csrc/core/problem.h)."""

import dataclasses

from jax_tcgemm.problem.function import Function, attributes_of


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """An epilogue; `Epilogue()` leaves D = alpha * op(A) op(B) + beta * C.

    Attributes:
      gated: there are two matrices B of the same layout and strides, and the function is of the
        products by both.
      up_offset: elements from the first of the two to the second; 0 when that is an operand of
        its own, after `b`.
      function: D and more results are what it makes of the product, or of both; None: none.
    """

    gated: bool = False
    up_offset: int = 0
    function: Function | None = None

    def attributes(self) -> dict:
        """Its part of the FFI attribute `gemm` (csrc/core/problem.h)."""
        attributes = {"gated": self.gated, "up_offset": self.up_offset}
        return attributes | attributes_of(self.function)

    def __str__(self) -> str:
        """What it does in a few words, "" when nothing."""
        words = ["gated"] if self.gated else []
        return " ".join([*words, self.function.name] if self.function else words)


BARE = Epilogue()
