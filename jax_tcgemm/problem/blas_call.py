"""What one BLAS call says apart from its arrays, and how its arrays are ordered."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

MATHS = ("default", "tf32", "pedantic", "no_reduced_precision")
# cuBLAS asks for at least this much.
_LEAST_WORKSPACE = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """How cuBLAS computes; the other implementations have nothing to choose and ignore it.

    Attributes:
      math: "default" multiplies float32 as float32; "tf32" lets it multiply float32 rounded to
        TF32; "pedantic" forbids every algorithm that departs from the plain sums; and
        "no_reduced_precision" sums half types in float32 throughout.
      atomics: allows algorithms that add with atomics: faster now and then, and then not the same
        bits each time.
      workspace_bytes: scratch memory for cuBLAS; None gives it what NVIDIA recommends.
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
    """Dimensions of a routine's arrays without batch: of those it reads, and of c, in place."""

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
    """The static part of a call; csrc/core/blas.h says what each routine computes.

    The operands are the arrays it reads, `items` of each; then c where `has_c`, `items` of it;
    then alpha and beta where `scalar_args`, and those here are not used. In front of their own
    dimensions all have the same number of batch dimensions, each of them 1 or the batch's extent.

    Attributes:
      op: the public function, for messages.
      routine: a name in ROUTINES.
      n: length of level 1's vectors.
      columns: of gbmv's matrix.
      increments: of the routine's vectors, in BLAS's order.
      op_a: "N", "T" or "C"; "C" says of a dot that its first vector is conjugated.
      op_b: of gemm's second matrix.
      upper: whether the triangle is the upper one.
      right: whether trsm's triangle is on the right.
      unit: whether the triangle's diagonal is taken to be ones.
      kl: diagonals below gbmv's main one.
      ku: diagonals above it.
      alpha: factor of the product.
      beta: factor of c.
      scalar_args: whether alpha and beta are operands.
      has_c: whether c is an operand.
      items: arrays of each name: products of a gemm over arrays of pointers, 2 for swap.
      options: how cuBLAS computes.
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
        """Dimensions of its arrays without batch."""
        return ROUTINES[self.routine]

    @property
    def operand_ranks(self) -> tuple[int, ...]:
        """The same for every operand in order."""
        ranks = [rank for rank in self.ranks.inputs for _ in range(self.items)]
        ranks += [self.ranks.c] * (self.items if self.has_c else 0)
        return (*ranks, *((0, 0) if self.scalar_args else ()))

    @property
    def increment_c(self) -> int:
        """The increment of the vector that is updated in place."""
        return self.increments[0 if self.routine in ("scal", "swap", "trsv") else 1]

    def replace(self, **changes) -> "Call":
        """The same call but for `changes`."""
        return dataclasses.replace(self, **changes)

    def split(self, operands) -> "Operands":
        """Operands, or anything there is one of for each, by name."""
        operands = list(operands)
        scalars = tuple(operands[-2:]) if self.scalar_args else None
        arrays = operands[: len(operands) - 2 * self.scalar_args]
        groups = [tuple(arrays[i : i + self.items]) for i in range(0, len(arrays), self.items)]
        c = groups.pop() if self.has_c else None
        return Operands(tuple(groups), c, scalars)


class Operands(NamedTuple):
    """A call's operands: groups of `items` arrays."""

    inputs: tuple[tuple, ...]
    c: tuple | None
    scalars: tuple | None

    def flat(self) -> list:
        """In the order in which the call takes them."""
        flat = [x for group in self.inputs for x in group]
        return flat + list(self.c or ()) + list(self.scalars or ())


def scale_dtype(dtype) -> np.dtype:
    """The dtype of alpha and beta: that of the arrays, float32 for half types."""
    return np.dtype(jnp.float32) if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)


def batch_shape(call: Call, shapes) -> tuple[int, ...]:
    """What the batch dimensions of a call's operands broadcast to."""
    batches = [
        shape[: len(shape) - rank] for shape, rank in zip(shapes, call.operand_ranks, strict=True)
    ]
    return lax.broadcast_shapes(*batches)


def span(n: int, increment: int) -> int:
    """Elements from the first to the last of n, `increment` apart."""
    return (n - 1) * increment + 1 if n else 0


def flops(call: Call, shapes, dtype) -> int:
    """Real additions and multiplications of a call, as they are usually counted."""
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
    """For each stored element (i, d) of a band its column i + d - kl, and whether it exists."""
    column = np.arange(rows)[:, None] + np.arange(kl + ku + 1) - kl
    return np.clip(column, 0, max(columns - 1, 0)), (column >= 0) & (column < columns)
