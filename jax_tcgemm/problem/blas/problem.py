"""A BLAS call with the shapes of its operands, the mirror of csrc/core/blas.h."""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from jax_tcgemm.problem.blas.call import Call, batch_shape, flops
from jax_tcgemm.problem.dtypes import DTYPE_NAMES, MAX_EXTENT

# Workspace in bytes that PyTorch and XLA give to cuBLAS's products.
_CUBLAS_WORKSPACE = {"gemv": 4 << 20, "trsm": 32 << 20, "gemm": 32 << 20}
_SMALL_WORKSPACE = 1 << 20


@dataclasses.dataclass(frozen=True)
class BlasProblem:
    """BLAS call with the shapes of its operands and the dtype of its arrays."""

    call: Call
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype

    kind: ClassVar[str] = "blas"

    @property
    def arrays(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the operands without alpha and beta."""
        return self.shapes[: len(self.shapes) - 2 * self.call.scalar_args]

    @property
    def batch(self) -> tuple[int, ...]:
        """Broadcast shape of the operands' batch dimensions."""
        return batch_shape(self.call, self.shapes)

    @property
    def in_dtype(self) -> str:
        """Name of the arrays' dtype."""
        return DTYPE_NAMES[self.dtype]

    @property
    def compute(self) -> str:
        """Compute type: the accumulator "f32" or "f64", or "tf32"."""
        if self.dtype.name in ("float64", "complex128"):
            return "f64"
        return "tf32" if self.call.options.math == "tf32" and self.dtype.itemsize > 2 else "f32"

    @property
    def num_entries(self) -> int:
        """Number of batch entries."""
        return math.prod(self.batch)

    @property
    def obstacle(self) -> str:
        """Reason why no library can run the call, known without a query; "" if one may."""
        if any(0 in shape for shape in self.shapes) or 0 in (self.call.n, self.call.columns):
            return "it is empty"
        if self.num_entries > MAX_EXTENT:
            return "its batch has more than 2**31 - 1 entries"
        if self.call.scalar_args and any(math.prod(shape) > 1 for shape in self.shapes[-2:]):
            return "its scalars differ over the batch"
        return ""

    @property
    def cublas_workspace_bytes(self) -> int:
        """Bytes of workspace for cuBLAS: those of the options, or the recommended size."""
        recommended = _CUBLAS_WORKSPACE.get(self.call.routine, _SMALL_WORKSPACE)
        return self.call.options.workspace_bytes or recommended

    def attributes(self) -> dict:
        """Return the problem's fields of the FFI attribute `blas` (csrc/core/blas.h)."""
        call = self.call
        alpha, beta = complex(call.alpha), complex(call.beta)
        found = {
            "routine": call.routine,
            "op_a": call.op_a,
            "op_b": call.op_b,
            "math": call.options.math,
            "batch": self.num_entries,
            "items": call.items,
            "kl": call.kl,
            "ku": call.ku,
            "upper": call.upper,
            "right": call.right,
            "unit": call.unit,
            "has_c": call.has_c,
            "scalar_args": call.scalar_args,
            "atomics": call.options.atomics,
            "alpha_re": alpha.real,
            "alpha_im": alpha.imag,
            "beta_re": beta.real,
            "beta_im": beta.imag,
        }
        return found | _layout(call, self.shapes, self.batch)

    def query(self) -> dict:
        """Return the problem as the modules' blas.reject() and blas.workspace_bytes() take it."""
        return self.attributes() | {"dtype": self.in_dtype}

    @property
    def flops(self) -> int:
        """Number of real additions and multiplications."""
        return flops(self.call, self.shapes, self.dtype)

    @property
    def bytes(self) -> int:
        """Least memory traffic in bytes: each array read once, each in-place array written once."""
        elements = [math.prod(shape) for shape in self.arrays]
        written = sum(elements[-self.call.items :]) if self.call.has_c else 0
        return (sum(elements) + written) * self.dtype.itemsize

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) or "()" for shape in self.arrays)
        return f"{self.call.routine} {self.in_dtype} {shapes}"


def _layout(call: Call, shapes, batch: tuple[int, ...]) -> dict:
    """Return M, N and K, and each array's leading dimension or increment and batch stride."""
    inputs, c, _ = call.split(zip(shapes, call.operand_ranks, strict=True))
    a = _widest(inputs[0]) if inputs else None
    b = _widest(inputs[1]) if len(inputs) > 1 else None
    out = c[0] if c else None
    x_increment, y_increment = call.increments
    m, n, k = _extents(call, a, b, out)
    layouts = {"a": (1, 0), "b": (1, 0), "c": (1, 0)}
    match call.routine:
        case "scal" | "swap":
            layouts["c"] = _vector(out, batch, x_increment, in_place=True)
            if call.routine == "swap":
                layouts["b"] = _vector(c[1], batch, y_increment, in_place=True)
        case "gemv" | "gbmv":
            layouts["a"] = _matrix(a, batch)
            layouts["b"] = _vector(b, batch, x_increment)
            length = m if call.op_a == "N" else n
            y = out or ((length,), 1)
            layouts["c"] = _vector(y, batch, y_increment, in_place=True)
        case "trsv":
            layouts["a"] = _matrix(a, batch)
            layouts["c"] = _vector(out, batch, x_increment, in_place=True)
        case "trsm" | "gemm":
            layouts["a"] = _matrix(a, batch)
            if b:
                layouts["b"] = _matrix(b, batch)
            layouts["c"] = (n, m * n)
        case _:
            layouts["a"] = _vector(a, batch, x_increment)
            if b:
                layouts["b"] = _vector(b, batch, y_increment)
            if out:
                layouts["c"] = _vector(out, batch, y_increment, in_place=True)
    found = {"m": m, "n": n, "k": k}
    for key, (ld, stride) in layouts.items():
        found |= {f"{key}_ld": ld, f"{key}_stride": stride}
    return found


def _widest(group) -> tuple:
    """Return the largest (shape, rank) of a group, which has the batch if any of them has."""
    return max(group, key=lambda item: math.prod(item[0]))


def _extents(call, a, b, c) -> tuple[int, int, int]:
    """Return m, n and k of csrc/core/blas.h."""
    match call.routine:
        case "gemv":
            return (*a[0][-2:], 1)
        case "gbmv":
            return a[0][-2], call.columns, 1
        case "trsv":
            return a[0][-1], 1, 1
        case "trsm":
            return (*c[0][-2:], 1)
        case "gemm":
            m, k = a[0][-2:] if call.op_a == "N" else a[0][:-3:-1]
            n = b[0][-1] if call.op_b == "N" else b[0][-2]
            return m, n, k
        case _:
            return 1, call.n, 1


def _vector(operand, batch, increment: int, in_place: bool = False) -> tuple[int, int]:
    """Return increment and batch stride of a (shape, rank); in-place vectors never broadcast."""
    (shape, _) = operand
    stacked = in_place or math.prod(shape[:-1]) > 1
    return increment, shape[-1] if stacked and math.prod(batch) > 1 else 0


def _matrix(operand, batch) -> tuple[int, int]:
    """Return the leading dimension and batch stride of a (shape, rank)."""
    (shape, _) = operand
    stacked = math.prod(shape[:-2]) > 1 and math.prod(batch) > 1
    return shape[-1], math.prod(shape[-2:]) if stacked else 0
