"""How long XLA's own kernel of a product takes, and cuBLASLt's where rows start anywhere.

XLA measures kernels of many tiles while it compiles and takes the fastest, so the time is the
shortest that any tile and any number of parts of K would have:

    time = launch + norm(loads, memory) + sums of parts
    loads = waves · k · (rows of a tile · t(A) + columns of a tile · t(B))

where t is what a block takes for each element that it loads, however much it multiplies: nearly
all that tells their kernels from each other. The constants were fitted to 352 random products on an
H100, so that little is lost by choosing what has the shortest predicted time; docs/tuning.md says
what that gives.
"""

import dataclasses
import itertools
import math

import numpy as np

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Problem

_EXTENTS = (16, 32, 64, 128, 256)
_TILES = np.array(
    [
        (m, n, splits)
        for m, n, splits in itertools.product(_EXTENTS, _EXTENTS, (1, 2, 4, 8, 16, 32, 64))
        if 2**10 <= m * n <= 2**15
    ],
    float,
)
_TILE_M, _TILE_N, _SPLITS = _TILES.T
# XLA splits K of a batch's products only where they are as small as this.
_MOST_SPLIT_OF_BATCH = 350
# From here on XLA reads operands whose rows start anywhere at the lower rate.
_LONG_K = 2048
# XLA converts both operands of such a product of 16 bits, each by a kernel of its own.
_TINY = 512


@dataclasses.dataclass(frozen=True)
class Libraries:
    """What XLA's and cuBLASLt's kernels do on an H200."""

    # An element of 16 bits, and of 32, that a block of XLA's loads.
    xla_element_us: tuple[float, float] = (0.91e-4, 1.72e-4)
    xla_launch_us: float = 1.12
    xla_splits_us: float = 4.9
    xla_tiny_us: float = 4.92
    xla_bytes_per_us: float = 4.16e6
    xla_unaligned_bytes_per_us: float = 1.62e6
    # A D of one row or one column; and one row of 16 bits by a large B, wherever that starts.
    xla_vector_us: float = 1.75
    xla_vector_bytes_per_us: float = 3.21e6
    xla_row_us: float = 2.8
    xla_row_bytes_per_us: float = 4.65e6
    # cuBLASLt, where rows do not start on 16 bytes: elements of 16 bits on 2 bytes, on more, and of
    # 32 bits; and how much faster those come that are no neighbours along K.
    cublaslt_element_us: tuple[float, float, float] = (2.76e-4, 1.46e-4, 2.95e-4)
    cublaslt_across: float = 0.57
    cublaslt_launch_us: float = 3.61
    cublaslt_splits_us: float = 4.6
    cublaslt_bytes_per_us: float = 3.58e6

    def with_memory(self, factor: float) -> "Libraries":
        """The same beside a memory that is so many times as fast."""
        rates = [field.name for field in dataclasses.fields(self) if "bytes_per_us" in field.name]
        return dataclasses.replace(self, **{name: getattr(self, name) * factor for name in rates})


H200 = Libraries()


def xla_us(p: Problem, num_sms: int, c: Libraries) -> float | None:
    """Microseconds of XLA's own kernel; None where it would copy operands, or nothing is known."""
    is_tf32 = p.compute == "tf32"
    is_16bit = p.compute == "f32" and p.a.dtype in ("f16", "bf16")
    is_row = p.m == 1 and p.batch == 1 and is_16bit
    if not (is_tf32 or is_16bit) or not p.is_bare or not (p.is_packed or is_row):
        return None
    vector = math.inf
    if p.m == 1 or (p.n == 1 and (p.k < _LONG_K or p.a.is_aligned or p.batch > 1)):
        vector = c.xla_vector_us + p.bytes / c.xla_vector_bytes_per_us
    if is_row:
        return min(vector, c.xla_row_us + p.bytes / c.xla_row_bytes_per_us)
    element_us = c.xla_element_us[is_tf32]
    unaligned = sum(
        num_bytes
        for operand, num_bytes in ((p.a, p.a_bytes), (p.b, p.b_bytes))
        if p.k >= _LONG_K and not operand.is_aligned
    )
    memory = (p.bytes - unaligned) / c.xla_bytes_per_us
    memory += unaligned / c.xla_unaligned_bytes_per_us
    can_split = p.batch == 1 or p.m * p.n <= _MOST_SPLIT_OF_BATCH
    sums = c.xla_splits_us if can_split else math.inf
    us = c.xla_launch_us + _tiles_us(
        p, num_sms, (element_us, element_us), memory, sums, c.xla_bytes_per_us
    )
    if is_16bit and p.k > 1 and p.m * p.n * p.k <= _TINY:
        us += c.xla_tiny_us
    return min(us, vector)


def cublaslt_unaligned_us(p: Problem, num_sms: int, c: Libraries) -> float:
    """Microseconds of cuBLASLt's first choice where rows of A or B do not start on 16 bytes."""
    size = DTYPES[p.a.dtype].itemsize
    strides = [x.ld for x in (p.a, p.b)] + [x.inner_stride for x in (p.a, p.b)]
    of_halves = c.cublaslt_element_us[all(stride % 2 == 0 for stride in strides)]
    element_us = c.cublaslt_element_us[2] if size == 4 else of_halves
    along_k = not p.a.transposed, p.b.transposed
    elements = [element_us * (1 if is_along else c.cublaslt_across) for is_along in along_k]
    memory = p.bytes / c.cublaslt_bytes_per_us
    sums = c.cublaslt_splits_us if p.batch == 1 else math.inf
    return c.cublaslt_launch_us + _tiles_us(
        p, num_sms, elements, memory, sums, c.cublaslt_bytes_per_us
    )


def _tiles_us(
    p: Problem,
    num_sms: int,
    elements_us: tuple[float, float],
    memory_us: float,
    sums_us: float,
    bytes_per_us: float,
) -> float:
    """The shortest time of any tile and number of parts; `sums_us` is that of adding up parts."""
    of_a, of_b = elements_us
    tiles = np.ceil(p.m / _TILE_M) * np.ceil(p.n / _TILE_N) * (p.batch * _SPLITS)
    depth = 32 * np.ceil(p.k / (32 * _SPLITS))
    loads = np.ceil(tiles / num_sms) * depth * (_TILE_M * of_a + _TILE_N * of_b)
    parts = 8 * p.batch * p.m * p.n / bytes_per_us * _SPLITS + sums_us
    us = np.cbrt(loads**3 + memory_us**3) + np.where(_SPLITS > 1, parts, 0)
    return float(us.min())
