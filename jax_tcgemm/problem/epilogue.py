"""What happens to a product before it is stored, as the C++ side knows it (csrc/core/problem.h).

With Z = alpha * op(A) op(B) + bias and f the activation:

    forward            D = f(Z) + beta * C                       aux_out = Z
    derivative         D = f'(aux_in) * Z + beta * C
    gated              D = f(Z) * Z_up + beta * C                aux_out = [Z | Z_up]
    gated, derivative  D = [f'(gate) * up * Z | f(gate) * Z] + beta * C, aux_in = [gate | up]

[x | y] is of shape (batch, m, 2, n). Or, in place of all that, D and more results are what a
function makes of the product, or both of a gated one, and of further operands.
"""

import dataclasses

from jax_tcgemm.problem.function import NO_FUNCTION, Function


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """An epilogue; `Epilogue()` leaves D = alpha * op(A) op(B) + beta * C.

    Attributes:
      activation: a name in `activations.ACTIVATIONS`.
      derivative: multiply by the derivative of the activation instead, at the operand `aux_in`.
      gated: see above. The forward product has two matrices B of the same layout and strides.
      up_offset: elements from the first of the two to the second; 0 when that is an operand of
        its own, after `b`.
      bias: "none", "n" (an element for each column; [bias | bias_up] when gated) or "m" (for each
        row; not when gated).
      bias_dtype: the dtype of D or of the accumulator; "" without a bias.
      bias_batch_stride: elements between the biases of two batch entries; 0 shares one.
      aux_out: also return Z, in the dtype of D. Not with `derivative`.
      column_sums: also return the sums over m of D as stored, in float32 (float64 for float64).
      function: in place of all of the above but `gated` and `up_offset`; None: none.
    """

    activation: str = "none"
    derivative: bool = False
    gated: bool = False
    up_offset: int = 0
    bias: str = "none"
    bias_dtype: str = ""
    bias_batch_stride: int = 0
    aux_out: bool = False
    column_sums: bool = False
    function: Function | None = None

    def attributes(self) -> dict:
        """Its part of the FFI attribute `gemm` (csrc/core/problem.h)."""
        fields = (field.name for field in dataclasses.fields(self))
        attributes = {name: getattr(self, name) for name in fields}
        del attributes["bias_dtype"]  # The operand says it.
        function = attributes.pop("function")
        return attributes | (NO_FUNCTION if function is None else function.attributes())

    def __str__(self) -> str:
        """What it does in a few words, "" when nothing: "silu' gated +bias[n f32] aux sums"."""
        words = []
        is_named = self.derivative or (self.gated and self.function is None)
        if self.activation != "none" or is_named:
            words.append(self.activation + "'" * self.derivative)
        if self.gated:
            words.append("gated")
        if self.bias != "none":
            per_batch = " batched" if self.bias_batch_stride else ""
            words.append(f"+bias[{self.bias} {self.bias_dtype}{per_batch}]")
        if self.function is not None:
            words.append(self.function.name)
        if self.aux_out:
            words.append("aux")
        if self.column_sums:
            words.append("sums")
        return " ".join(words)


BARE = Epilogue()
