"""Description of a tensor operation; csrc/libraries/cutensor/operation.h has the equations."""

import dataclasses
import math

import numpy as np

from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.tensor.modes import Modes, letters

# The roles of the operands (A, B, C) in order; an optional C comes last.
_ROLES = {
    "contract": "abc",
    "permute": "a",
    "elementwise_binary": "ac",
    "elementwise_trinary": "abc",
    "reduce": "ac",
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """Tensor operation on packed row-major arrays of one dtype.

    Attributes:
      kind: contract, permute, elementwise_binary, elementwise_trinary or reduce.
      dtype: dtype of every array.
      extents: size of each mode.
      operands: modes of each operand; C, if present, has the result's modes.
      result: modes of the result.
      unary: unary operator of each operand.
      combine: binary operators in the order in which they are applied; for reduce, its operator.
      scalars: alpha, beta and gamma.
      compute: cuTENSOR's name of the compute type.
      algorithm: cuTENSOR's name of the algorithm of a contraction.
      symmetric: whether a contraction of an array with itself is a GEMM with a symmetric result, of
        which kernels compute half.
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
    symmetric: bool = False

    def attributes(self, workspace_bytes: int = 0) -> dict:
        """Return the attributes of the FFI call (csrc/ffi/cutensor.h), without the ABI number."""
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
        """Return the attributes as Python objects, for the _cutensor module's queries."""
        return {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in self.attributes().items()
        }

    @property
    def in_dtype(self) -> str:
        """Name of the operands' dtype on the C++ side."""
        return DTYPE_NAMES.get(self.dtype, str(self.dtype))

    def shape(self, modes: Modes) -> tuple[int, ...]:
        """Return the shape of an array with these modes."""
        return tuple(self.extents[mode] for mode in modes)

    @property
    def bytes(self) -> int:
        """Least memory traffic in bytes: every operand read and the result written once."""
        arrays = (*self.operands, self.result)
        return sum(math.prod(self.shape(modes)) for modes in arrays) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Real multiplications and additions of a contraction; elements read by other kinds.

        For a symmetric result, only elements on and below the diagonal count.
        """
        if self.kind != "contract":
            return sum(math.prod(self.shape(modes)) for modes in self.operands)
        per_product = 8 if self.dtype.kind == "c" else 2
        products = math.prod(self.extents)
        if self.symmetric:
            a, b = self.operands[:2]
            rows = math.prod(self.shape([mode for mode in a if mode not in b]))
            products = products // rows * (rows + 1) // 2
        return per_product * products

    def __str__(self) -> str:
        subscripts = f"{','.join(map(letters, self.operands))}->{letters(self.result)}"
        sizes = "x".join(map(str, self.extents))
        compute = f" ({self.compute})" if self.compute else ""
        symmetric = " symmetric" if self.symmetric else ""
        return f"{self.kind} {subscripts} {sizes} {self.in_dtype}{compute}{symmetric}"


def dot_dimensions(a: Modes, b: Modes, result: Modes):
    """Return a contraction as dot_general's dimension numbers and a permutation of its result."""
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
    """Return whether exchanging the operands of a permuted product removes the permutation."""
    (lhs_contract, _), (lhs_batch, _) = dimension_numbers
    num_batch, ndim = len(lhs_batch), len(permutation)
    first_of_rhs = lhs_ndim - len(lhs_contract)
    free = (*range(first_of_rhs, ndim), *range(num_batch, first_of_rhs))
    identity = tuple(range(ndim))
    return identity != permutation == (*identity[:num_batch], *free)
