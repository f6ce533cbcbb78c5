"""Device code of an elementwise function, with descriptions of its operands and results."""

import dataclasses

import numpy as np

from jax_tcgemm.epilogues.code.places import Places, linear, row_major

# What the generated code calls, below csrc.
HEADER = "epilogue/elementwise.cuh"


class InexpressibleError(ValueError):
    """A function is more than elementwise code; the message names the equation.

    Attributes:
      equation: the primitive with its operands' types and where it was written, or which result.
      rule: what it must do, and does not.
    """

    def __init__(self, equation: str, rule: str):
        super().__init__(f"epilogue: {equation} must {rule}")
        self.equation, self.rule = equation, rule


@dataclasses.dataclass(frozen=True)
class Read:
    """One element of an operand, which the function takes for each element of the result.

    An operand that is used in two ways, such as an array and its transpose, is read twice.

    Attributes:
      operand: its number, after the accumulators; closed-over arrays come after all others.
      dtype: its dtype. Random keys are arrays of uint32 with one more dimension, the last.
      places: where the element lies, along each of the operand's dimensions.
    """

    operand: int
    dtype: np.dtype
    places: Places

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The result's dimensions along which the operand is read; along others it broadcasts."""
        return tuple(sorted({dim for place in self.places for dim in place.dimensions}))

    def strides(self, shape: tuple[int, ...], rank: int) -> tuple[int, tuple[int, ...]]:
        """Where the elements are in memory.

        Args:
          shape: the operand's, packed in row-major order.
          rank: of the result.

        Returns:
          The first element, and the stride along each dimension of the result, all in elements.
        """
        place = linear(self.places, row_major(shape), rank)
        return place.offset, place.factors


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Reduction of the values that a function gives for each element.

    Attributes:
      kind: "sum", "max" or "min".
      dimensions: dimensions of the accumulators that are reduced.
    """

    kind: str
    dimensions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """An array that is stored, of the accumulators' shape without the dimensions that are reduced.

    The function's own result has the same elements in the same order: it may be of another shape,
    with dimensions of extent 1, and, if this is a reduction, of another dtype, to which it is
    converted at the end.

    Attributes:
      dtype: of what the function gives for each element, and of the array.
      reduction: None for an element each.
    """

    dtype: np.dtype
    reduction: Reduction | None = None


@dataclasses.dataclass(frozen=True)
class EpilogueSource:
    """An elementwise function as device code.

    Two functions have equal ones when the same code computes them from the same operands.

    Attributes:
      struct: C++ text, of a struct ``Epilogue`` with one function for one element::

          template <typename Index>
          static __device__ void apply(<accumulators>, <reads>, const Index& at, <results>&)

        ``at[dim]`` is the element's index along a dimension of the result, an int32_t.
      accumulators: their dtypes.
      reads: what it takes of operands.
      results: what it gives.
      index_dimensions: the dimensions of the result whose indices it asks for.
    """

    struct: str
    accumulators: tuple[np.dtype, ...]
    reads: tuple[Read, ...]
    results: tuple[Result, ...]
    index_dimensions: tuple[int, ...] = ()

    @property
    def definitions(self) -> str:
        """The C++ text to put after `HEADER`: of `tcgemm::elementwise::Epilogue`."""
        name = "namespace tcgemm::elementwise"
        return f"{name} {{\n\n{self.struct}\n}}  // {name}\n"

    def __str__(self) -> str:
        """Return comments on the parameters, followed by the code."""
        lines = [f"acc{i}: {dtype}" for i, dtype in enumerate(self.accumulators)]
        for i, read in enumerate(self.reads):
            along = f" along {read.dimensions}" if read.dimensions else ""
            lines.append(f"x{i}: operand {read.operand}, {read.dtype}{along}")
        for i, result in enumerate(self.results):
            reduction = result.reduction
            over = f", its {reduction.kind} over {reduction.dimensions}" if reduction else ""
            lines.append(f"y{i}: {result.dtype}{over}")
        return "".join(f"// {line}\n" for line in lines) + self.struct
