"""The one description of a tensor operation, as the C++ side knows it.

csrc/libraries/cutensor/operation.h has the equations.
"""

import dataclasses
import math

import numpy as np

from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.modes import Modes, letters

# Which of A, B and C the operands are, in order; C, where it is optional, comes last.
_ROLES = {
    "contract": "abc",
    "permute": "a",
    "elementwise_binary": "ac",
    "elementwise_trinary": "abc",
    "reduce": "ac",
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """A tensor operation on packed row-major arrays of one dtype.

    Attributes:
      kind: contract, permute, elementwise_binary, elementwise_trinary or reduce.
      dtype: of every array.
      extents: of each mode.
      operands: the modes of each operand; C's, where it is there, are the result's.
      result: the modes of the result.
      unary: the unary operator of each operand.
      combine: the binary operators in the order in which they are applied; of reduce, its own.
      scalars: alpha, beta and gamma.
      compute: how numbers are multiplied and added, as cuTENSOR calls it.
      algorithm: of a contraction, as cuTENSOR calls it.
    """

    kind: str
    dtype: np.dtype
    extents: tuple[int, ...]
    operands: tuple[Modes, ...]
    result: Modes
    unary: tuple[str, ...]
    combine: tuple[str, ...] = ()
    scalars: tuple[complex, complex, complex] = (1, 0, 1)
    compute: str = ""
    algorithm: str = "default"

    def attributes(self, workspace_bytes: int = 0) -> dict:
        """The attributes of the FFI call (csrc/ffi/cutensor.h) but its ABI number."""
        roles = dict(zip(_ROLES[self.kind], range(len(self.operands)), strict=False))
        numbers = np.array([[complex(x).real, complex(x).imag] for x in self.scalars], np.float64)
        attributes = {
            "operation": self.kind,
            "dtype": DTYPE_NAMES[self.dtype],
            "compute": self.compute,
            "algorithm": self.algorithm,
            "extents": np.array(self.extents, np.int64),
            "d_modes": np.array(self.result, np.int64),
            "combine": self.combine[-1] if self.combine else "add",
            "combine_ab": self.combine[0] if len(self.combine) == 2 else "add",
            "has_c": "c" in roles,
            "scalars": numbers.reshape(-1),
            "workspace_bytes": workspace_bytes,
        }
        for role in "abc":
            index = roles.get(role)
            modes = () if index is None else self.operands[index]
            attributes[f"{role}_modes"] = np.array(modes, np.int64)
            attributes[f"{role}_op"] = "identity" if index is None else self.unary[index]
        return attributes

    def query(self) -> dict:
        """What the _cutensor module's queries take: the attributes as Python objects."""
        return {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in self.attributes().items()
        }

    @property
    def in_dtype(self) -> str:
        """The operands' dtype, as the C++ side spells it."""
        return DTYPE_NAMES.get(self.dtype, str(self.dtype))

    def shape(self, modes: Modes) -> tuple[int, ...]:
        """The shape of an array of these modes."""
        return tuple(self.extents[mode] for mode in modes)

    @property
    def bytes(self) -> int:
        """Least memory traffic: every operand read and the result written once."""
        arrays = (*self.operands, self.result)
        return sum(math.prod(self.shape(modes)) for modes in arrays) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Real multiplications and additions of a contraction; elements read, of anything else."""
        if self.kind != "contract":
            return sum(math.prod(self.shape(modes)) for modes in self.operands)
        per_product = 8 if self.dtype.kind == "c" else 2
        return per_product * math.prod(self.extents)

    def __str__(self) -> str:
        subscripts = f"{','.join(map(letters, self.operands))}->{letters(self.result)}"
        sizes = "x".join(map(str, self.extents))
        compute = f" ({self.compute})" if self.compute else ""
        return f"{self.kind} {subscripts} {sizes} {self.in_dtype}{compute}"


def dot_dimensions(a: Modes, b: Modes, result: Modes):
    """A contraction as dot_general's dimension numbers and a permutation of its result."""
    batch = [mode for mode in a if mode in b and mode in result]
    contracted = [mode for mode in a if mode in b and mode not in result]
    taken = {*batch, *contracted}
    free = [mode for operand in (a, b) for mode in operand if mode not in taken]
    natural = [*batch, *free]
    numbers = tuple(
        (tuple(map(a.index, modes)), tuple(map(b.index, modes))) for modes in (contracted, batch)
    )
    return numbers, tuple(natural.index(mode) for mode in result)


def exchanges_operands(dimension_numbers, permutation: tuple[int, ...], lhs_ndim: int) -> bool:
    """Whether a permuted product is that of the exchanged operands as it comes out."""
    (lhs_contract, _), (lhs_batch, _) = dimension_numbers
    num_batch, ndim = len(lhs_batch), len(permutation)
    first_of_rhs = lhs_ndim - len(lhs_contract)
    free = (*range(first_of_rhs, ndim), *range(num_batch, first_of_rhs))
    identity = tuple(range(ndim))
    return identity != permutation == (*identity[:num_batch], *free)
