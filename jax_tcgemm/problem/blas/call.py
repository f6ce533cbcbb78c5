"""Static parameters of a BLAS call, and the order of its operands."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

MATHS = ("default", "tf32", "pedantic", "no_reduced_precision")
# The least workspace that cuBLAS accepts, in bytes.
_LEAST_WORKSPACE = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of cuBLAS; other implementations ignore them.

    Attributes:
      math: "default" multiplies float32 as float32; "tf32" allows float32 rounded to TF32;
        "pedantic" forbids every algorithm that departs from plain accumulation; and
        "no_reduced_precision" accumulates 16-bit types in float32 throughout.
      atomics: whether algorithms may accumulate with atomics, which is sometimes faster and then
        not deterministic.
      workspace_bytes: scratch memory for cuBLAS; None takes the size that NVIDIA recommends.
    """

    math: str = "default"
    atomics: bool = False
    workspace_bytes: int | None = None

    def __post_init__(self):
        if not isinstance(self.math, str) or self.math not in MATHS:
            raise ValueError(
                f"blas.Options: math must be one of {', '.join(MATHS)}, got math={self.math!r}; "
                "see jax_tcgemm.blas.Options"
            )
        if not isinstance(self.atomics, bool):
            raise TypeError(
                f"blas.Options: atomics must be a bool, got atomics={self.atomics!r}; "
                "pass True or False"
            )
        bytes_ = self.workspace_bytes
        if bytes_ is not None and not (
            isinstance(bytes_, int) and _LEAST_WORKSPACE <= bytes_ < 2**63
        ):
            raise ValueError(
                f"blas.Options: workspace_bytes must be an integer of at least {_LEAST_WORKSPACE}, "
                f"got workspace_bytes={bytes_!r}; None takes the recommended size"
            )


DEFAULT_OPTIONS = Options()


class Ranks(NamedTuple):
    """Numbers of dimensions, without batch, of a routine's inputs and of the in-place c."""

    inputs: tuple[int, ...]
    c: int | None = None


ROUTINES = {
    "iamax": Ranks((1,)),
    "iamin": Ranks((1,)),
    "asum": Ranks((1,)),
    "nrm2": Ranks((1,)),
    "dot": Ranks((1, 1)),
    "scal": Ranks((), 1),
    "axpy": Ranks((1,), 1),
    "swap": Ranks((), 1),
    "gemv": Ranks((2, 1), 1),
    "gbmv": Ranks((2, 1), 1),
    "trsv": Ranks((2,), 1),
    "trsm": Ranks((2,), 2),
    "gemm": Ranks((2, 2), 2),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """Static parameters of a BLAS call; csrc/core/blas.h has the equation of each routine.

    The operands are `items` arrays of each input; then `items` arrays c, with `has_c`; then alpha
    and beta, with `scalar_args`, which replace the attributes. All operands have the same number of
    leading batch dimensions, each of size 1 or the batch's size.

    Attributes:
      op: the public function, for messages.
      routine: a name in ROUTINES.
      n: length of the vectors of level 1 routines.
      columns: number of columns of gbmv's matrix.
      increments: increments of the routine's vectors, in BLAS's order.
      op_a: "N", "T" or "C"; for dot, "C" conjugates the first vector.
      op_b: "N", "T" or "C", for gemm's second matrix.
      upper: whether the triangle is the upper one.
      right: whether trsm's triangle is on the right.
      unit: whether the triangle's diagonal is taken as ones.
      kl: number of diagonals below gbmv's main diagonal.
      ku: number of diagonals above gbmv's main diagonal.
      alpha: scale of the product.
      beta: scale of c.
      scalar_args: whether alpha and beta are operands.
      has_c: whether c is an operand.
      items: number of arrays of each operand: products of a pointer-array gemm, or 2 for swap.
      options: options of cuBLAS.
      implementation: name to force, or None.
    """

    op: str
    routine: str
    n: int = 1
    columns: int = 1
    increments: tuple[int, int] = (1, 1)
    op_a: str = "N"
    op_b: str = "N"
    upper: bool = False
    right: bool = False
    unit: bool = False
    kl: int = 0
    ku: int = 0
    alpha: complex = 1.0
    beta: complex = 0.0
    scalar_args: bool = False
    has_c: bool = False
    items: int = 1
    options: Options = DEFAULT_OPTIONS
    implementation: str | None = None

    @property
    def ranks(self) -> Ranks:
        """Numbers of dimensions of the routine's arrays, without batch."""
        return ROUTINES[self.routine]

    @property
    def operand_ranks(self) -> tuple[int, ...]:
        """Number of dimensions of every operand in order, without batch."""
        ranks = [rank for rank in self.ranks.inputs for _ in range(self.items)]
        ranks += [self.ranks.c] * (self.items if self.has_c else 0)
        return (*ranks, *((0, 0) if self.scalar_args else ()))

    @property
    def increment_c(self) -> int:
        """Increment of the vector that is updated in place."""
        return self.increments[0 if self.routine in ("scal", "swap", "trsv") else 1]

    def replace(self, **changes) -> "Call":
        """Return the call with `changes`."""
        return dataclasses.replace(self, **changes)

    def split(self, operands) -> "Operands":
        """Group the operands, or one value for each operand, by name."""
        operands = list(operands)
        scalars = tuple(operands[-2:]) if self.scalar_args else None
        arrays = operands[: len(operands) - 2 * self.scalar_args]
        groups = [tuple(arrays[i : i + self.items]) for i in range(0, len(arrays), self.items)]
        c = groups.pop() if self.has_c else None
        return Operands(tuple(groups), c, scalars)


class Operands(NamedTuple):
    """Operands of a call, in groups of `items` arrays."""

    inputs: tuple[tuple, ...]
    c: tuple | None
    scalars: tuple | None

    def flat(self) -> list:
        """Return the operands in the order in which the call takes them."""
        flat = [x for group in self.inputs for x in group]
        return flat + list(self.c or ()) + list(self.scalars or ())


def scale_dtype(dtype) -> np.dtype:
    """Return the dtype of alpha and beta: the arrays' dtype, float32 for 16-bit arrays."""
    return np.dtype(jnp.float32) if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)


def batch_shape(call: Call, shapes) -> tuple[int, ...]:
    """Return the broadcast shape of the batch dimensions of a call's operands."""
    batches = [
        shape[: len(shape) - rank] for shape, rank in zip(shapes, call.operand_ranks, strict=True)
    ]
    return lax.broadcast_shapes(*batches)


def span(n: int, increment: int) -> int:
    """Return the number of elements that n elements, `increment` apart, span."""
    return (n - 1) * increment + 1 if n else 0


def flops(call: Call, shapes, dtype) -> int:
    """Return the usual count of real additions and multiplications of a call."""
    batch = math.prod(batch_shape(call, shapes)) * (4 if np.dtype(dtype).kind == "c" else 1)
    match call.routine:
        case "gemv":
            return 2 * batch * math.prod(shapes[0][-2:])
        case "gbmv":
            return 2 * batch * math.prod(shapes[0][-2:])
        case "trsv":
            return batch * shapes[0][-1] ** 2
        case "trsm":
            return batch * shapes[0][-1] * math.prod(shapes[-1 - 2 * call.scalar_args][-2:])
        case "gemm":
            rows, columns = shapes[0][-2:]
            m, k = (rows, columns) if call.op_a == "N" else (columns, rows)
            n = shapes[call.items][-1 if call.op_b == "N" else -2]
            return 2 * call.items * batch * m * n * k
        case _:
            return 2 * batch * call.n


def band_index(rows: int, columns: int, kl: int, ku: int):
    """Return the column i + d - kl of each band element (i, d), and whether it is in the matrix."""
    column = np.arange(rows)[:, None] + np.arange(kl + ku + 1) - kl
    return np.clip(column, 0, max(columns - 1, 0)), (column >= 0) & (column < columns)
