"""Estimated time of a contraction by each implementation: the longer of arithmetic and memory.

Implementations differ in which operands must be copied first:

* Our GEMMs read any two levels of batch strides in place.
* XLA's dot reads an operand in place if its batch dimensions are adjacent, and so are its free and
  its contracted dimensions. The result has the same rule, with free dimensions in the operands'
  order. A product by a vector needs no copy, because XLA fuses it as a reduction.
* cuTENSOR reads every layout in place, at a lower rate; at a much lower one where the fastest mode
  of an array is a batch mode.

Where the cost model of GEMMs (cost_model) knows the product, its estimate is used.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.tensor.operation import Operation
from jax_tcgemm.selection.choice import Choice
from jax_tcgemm.selection.devices import Device
from jax_tcgemm.selection.ranking import ranked
from jax_tcgemm.selection.roofline import peaks


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants of an H200; rates are fractions of the data sheet's peak rates.

    Fitted to benchmarks/results/h200-tensor.jsonl.
    """

    launch_us: float = 3.0
    memory: float = 0.8  # bandwidth of operands and results
    copy: float = 0.72  # bandwidth of XLA's permutations
    gemm: float = 0.75
    # Rate of XLA's TF32 products, as a fraction of the rate that the cost model has for cuBLASLt.
    xla_tf32: float = 0.91
    cutensor_launch_us: float = 8.0
    cutensor_memory: float = 0.4
    cutensor: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"f16": 0.6, "tf32": 0.3, "f32": 0.75, "f64": 0.7}
    )
    # cuTENSOR's loads are as wide as the fastest mode lets them be:
    # https://docs.nvidia.com/cuda/cutensor/latest/user_guide.html#performance-guidelines
    fastest_mode_of_batch: float = 8.0
    # Another implementation replaces XLA if its estimated time is below this fraction of XLA's.
    # Contractions below `short_us` always fall back to XLA, which fuses them with their neighbors.
    margin: float = 0.95
    cutensor_margin: float = 0.8
    short_us: float = 10.0

    def beats_xla(self, name: str, us: dict[str, float]) -> bool:
        """Return whether the estimated time of `name` is short enough to replace XLA."""
        margin = self.cutensor_margin if name == "cutensor" else self.margin
        return us["xla"] >= self.short_us and us[name] < margin * us["xla"]


H200 = Calibration()

# Compute types with split-precision emulation: the dtype and number of their products.
_PRODUCTS = {"3xtf32": ("tf32", 3), "9xbf16": ("bf16", 9), "4xf16": ("f16", 4)}


class AsProduct(NamedTuple):
    """A contraction as one of our GEMMs, with its choice and the bytes of operand copies.

    `multiplies_terms` says that the GEMM multiplies split-precision terms of the operands, which no
    other implementation does.
    """

    problem: Problem
    choice: Choice
    copied_bytes: int
    multiplies_terms: bool = False


def contraction_us(
    operation: Operation,
    product: AsProduct,
    device: Device,
    calibration: Calibration = H200,
) -> dict[str, float]:
    """Return the estimated time in microseconds of "gemm", "cutensor" and "xla".

    Args:
      operation: a contraction with its compute type.
      product: the contraction as one of our GEMMs.
      device: the device that runs the contraction.
      calibration: the device's constants.
    """
    # Only our GEMM computes half of a symmetric result; `product` says so.
    operation = dataclasses.replace(operation, symmetric=False)
    c, known = calibration, peaks(device.compute_capability) or peaks(90)
    bandwidth = known.bytes / 1e6
    kind, count = _PRODUCTS.get(operation.compute, (operation.compute, 1))
    if operation.dtype.itemsize == 2 or kind in ("f16", "bf16"):
        kind, rate = "f16", known.f16
    else:
        rate = {"tf32": known.tf32, "f64": known.f64}.get(kind, known.f32)
    arithmetic = operation.flops * count / (rate / 1e6)
    memory = operation.bytes / (bandwidth * c.memory)

    ranking = ranked(product.problem, device)
    predicted = {(x.implementation, x.config): us for x, us in ranking if us is not None}
    one_product = max(arithmetic / c.gemm, memory) + c.launch_us
    ours = predicted.get((product.choice.implementation, product.choice.config), one_product)
    # XLA's product takes cuBLASLt's time, even where a kernel of ours is faster.
    xla = next((us for (name, _), us in predicted.items() if name == "cublaslt"), one_product)
    a, b = operation.operands[:2]
    if product.problem.batch > 1 and not set(a) & set(b) & set(operation.result):
        # Our GEMM's batch is a free dimension, which XLA's dot has among its rows or columns; XLA
        # permutes the result.
        xla = min(xla, one_product)
    if kind == "tf32" and arithmetic / c.gemm > memory:
        xla /= c.xla_tf32
    xla_copied = xla_copied_bytes(operation)
    if _is_by_a_vector(operation):
        xla, xla_copied = max(operation.flops / (known.f32 / 1e6), memory) + c.launch_us, 0

    def copies(num_bytes):
        return num_bytes / (bandwidth * c.copy) + (c.launch_us if num_bytes else 0)

    finish = 0.0
    if operation.scalars[0] != 1 or len(operation.operands) == 3:
        finish = copies(3 * math.prod(operation.shape(operation.result)) * operation.dtype.itemsize)
    cutensor_memory = operation.bytes / (bandwidth * c.cutensor_memory)
    cutensor_arithmetic = arithmetic / c.cutensor.get(kind, c.cutensor["f32"])
    cutensor = max(cutensor_arithmetic, cutensor_memory)
    if _has_fastest_mode_of_batch(operation):
        cutensor *= c.fastest_mode_of_batch
    return {
        "gemm": ours + finish + copies(product.copied_bytes),
        "cutensor": cutensor + c.cutensor_launch_us,
        "xla": xla + finish + copies(xla_copied),
    }


def xla_copied_bytes(operation: Operation) -> int:
    """Return the bytes read and written to permute arrays that XLA's dot cannot use in place."""
    a, b = operation.operands[:2]
    result = operation.result
    batch = {mode for mode in a if mode in b and mode in result}
    contracted = {mode for mode in a if mode in b and mode not in result}
    groups = (
        (a, (batch, contracted, set(a) - batch - contracted)),
        (b, (batch, contracted, set(b) - batch - contracted)),
        (result, (batch, set(result) & set(a) - batch, set(result) & set(b) - batch)),
    )

    def order(modes, kept):
        return [mode for mode in modes if mode in kept and operation.extents[mode] != 1]

    reordered = {
        "b": order(a, contracted) != order(b, contracted),
        "d": any(order(x, set(result) - batch) != order(result, set(x) - batch) for x in (a, b)),
    }
    copied = 0
    for name, (modes, runs) in zip("abd", groups, strict=True):
        kept = [mode for mode in modes if operation.extents[mode] != 1]
        if not _is_readable(kept, runs) or reordered.get(name):
            copied += 2 * math.prod(operation.shape(modes)) * operation.dtype.itemsize
    return copied


def _is_by_a_vector(operation: Operation) -> bool:
    """Return whether an operand has no free dimensions, apart from those of size 1."""
    others = (set(operation.operands[1]), set(operation.operands[0]))
    return any(
        all(mode in other or operation.extents[mode] == 1 for mode in modes)
        for modes, other in zip(operation.operands[:2], others, strict=True)
    )


def _has_fastest_mode_of_batch(operation: Operation) -> bool:
    a, b = operation.operands[:2]
    batch = set(a) & set(b) & set(operation.result)
    fastest = [
        next((mode for mode in reversed(modes) if operation.extents[mode] != 1), None)
        for modes in (a, b, operation.result)
    ]
    return any(mode in batch for mode in fastest)


def _is_readable(modes, runs) -> bool:
    """Return whether the modes of each run are adjacent, and the fastest is no batch mode."""
    labels = [next(i for i, run in enumerate(runs) if mode in run) for mode in modes]
    changes = sum(x != y for x, y in itertools.pairwise(labels))
    return changes == len(set(labels)) - 1 and (not labels or labels[-1] != 0)
