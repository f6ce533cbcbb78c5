"""What runs a problem where neither a table nor a model says: rules made of measurements."""

import math
import sys

from jax_tcgemm.problem.blas import BlasProblem
from jax_tcgemm.problem.blas_call import DEFAULT_OPTIONS
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.packed import PackedProblem
from jax_tcgemm.problem.ragged import RaggedProblem
from jax_tcgemm.selection.configs import (
    PackedConfig,
    WgmmaConfig,
    WidePackedConfig,
    parse_or_none,
)
from jax_tcgemm.selection.implementations import AnyProblem, Candidate

# A batch of these is one launch an entry, unless it folds into one call (csrc/core/blas.cc).
_NOT_BATCHED_IN_CUBLAS = ("iamax", "iamin", "asum", "nrm2", "swap", "gbmv")


def on_cpu(problem: AnyProblem, considered) -> tuple[Candidate, str]:
    """The CPU's default: XLA's own product, but for what `host` was measured to gain at."""
    *hosts, xla = considered
    if not hosts:
        return xla, "no other implementation runs on a CPU"
    if hosts[0].reason:
        return xla, f"host cannot run this: {hosts[0].reason}"
    refused = {host.config for host in hosts if host.reason}
    if problem.kind == "gemm" and {"avx512", "avx2"} <= refused:
        return xla, "host is known beside XLA's own product with AVX2 or AVX-512 only"
    if not _gains_on_host(problem):
        return xla, "host is not known to gain on XLA inside a CPU program"
    return hosts[0], "host is known to gain on XLA inside a CPU program"


def _gains_on_host(problem: AnyProblem) -> bool:
    """Whether `host` took at most about 0.8 of XLA:CPU's time in a loop, with AVX2 and AVX-512.

    A call in a program costs a microsecond or two where XLA would inline the product, and keeps it
    from fusing what follows. So a gain needs work, and something that XLA:CPU does badly: batches
    of products from 4x4x4 to below 8x8x8, a transposed A with few columns of B, a matrix of 16
    bits times a vector, integers whose sums run down the columns of A, complex numbers, groups, of
    which it multiplies every row by each, bands and triangles. uint8 and complex128 follow int8 and
    complex64. csrc/cpu/README.md has figures.
    """
    match problem.kind:
        case "rows":
            return problem.pairs * problem.n >= 2**13
        case "ragged":
            return problem.groups * problem.m * problem.n * problem.k >= 2**18
        case "blas":
            return (
                problem.call.routine in ("gbmv", "nrm2", "trsm", "trsv") and problem.flops > 2**18
            )
    m, n, k = problem.m, problem.n, problem.k
    work = m * n * k
    if problem.batch >= 64 and min(m, n, k) >= 4 and work < 2**9:
        return True
    few_columns = problem.a.transposed and m >= 512 and 1 < n <= m // 16
    match problem.a.dtype:
        case "f32":
            return few_columns and work >= 2**16
        case "f16" | "bf16":
            return (few_columns or n == 1) and work >= 2**16
        case "s8" | "u8":
            return problem.a.transposed and n > 1 and work >= 2**20
        case "c64" | "c128":
            return min(m, n) >= 64 and work >= 2**20
    return False


def of_blas(problem: BlasProblem, considered) -> tuple[Candidate, str]:
    """BLAS calls on a GPU: cuBLAS, but for what it was measured to be slower at than XLA.

    Options that were set need cuBLAS. Bands are a hundred times slower and more, rows of float32
    matrices 1.3 times (benchmarks/results/h200-blas.jsonl).
    """
    cublas, xla = considered
    call = problem.call
    if cublas.reason:
        return xla, cublas.reason
    if call.routine in _NOT_BATCHED_IN_CUBLAS and problem.num_entries > 1:
        return xla, f"cuBLAS has no batched {call.routine}: it would be a launch an entry"
    rows = call.routine == "gemv" and call.op_a == "N" and problem.in_dtype == "f32"
    if call.options == DEFAULT_OPTIONS and (call.routine == "gbmv" or rows):
        return xla, "cuBLAS was measured slower than XLA"
    return cublas, "the library of BLAS calls on a GPU"


def is_of_wrong_width(problem: RaggedProblem, num_sms: int, candidate: Candidate) -> bool:
    """Whether a config of wgmma has tiles of 256 tokens where 64 are faster, or the reverse."""
    if candidate.implementation != "wgmma":
        return False
    is_narrow = WgmmaConfig.parse(candidate.config).tile_n == 64
    return is_narrow != _is_for_narrow(problem, num_sms)


def _is_for_narrow(problem: RaggedProblem, num_sms: int) -> bool:
    """Whether tiles of 64 tokens are faster than those of 256.

    For groups of few tokens, each weight is read once with either tile, and narrow tiles leave room
    for more stages. Where there are fewer tiles of 256 tokens than SMs, narrow tiles run on more
    SMs: that halves the time where K is short, which is mostly not multiplication (H100).
    """
    if problem.form != "rows":
        return False
    if problem.tokens <= 32 * problem.groups:
        return True
    # On average half a tile of each group is empty.
    tiles = (problem.tokens / 256 + problem.groups / 2) * -(-problem.n // 128)
    most = (0.9 if problem.k <= 512 else 0.5) * num_sms
    # Only wide tiles run functions.
    return problem.function is None and tiles <= most


# Bytes of a weight of 4 bits that an SM multiplies in a microsecond by so many rows.
_PACKED_RATES = {8: 32.8e3, 16: 26.4e3, 32: 19.5e3}


# In place of a time that is not known, later than all that are.
UNKNOWN_US = sys.float_info.max

# Rows of a weight from which on XLA's program, which dequantizes the weight once, is faster than
# kernels that read the weight again for every 32 rows.
_MOST_NARROW_ROWS = 512


def packed_us(problem: PackedProblem, num_sms: int, candidate: Candidate) -> float:
    """Estimate the time of a config for a packed weight, by which configs are ordered.

    XLA's program, whose time is not known, comes after all kernels with an estimate, and before
    those that are not to run.
    """
    if problem.form == "weight":
        return math.inf
    match parse_or_none(candidate.config):
        case PackedConfig() as config:
            is_long = problem.rows_of_weight > _MOST_NARROW_ROWS
            return math.inf if is_long else _narrow_packed_us(problem, num_sms, config)
        case WidePackedConfig(dequantizes=True) as config:
            return _dequantizing_packed_us(problem, num_sms, config)
        case WidePackedConfig() as config:
            return _wide_packed_us(problem, num_sms, config)
    return UNKNOWN_US


def _narrow_packed_us(problem: PackedProblem, num_sms: int, config: PackedConfig) -> float:
    """Of kernels that multiply by mma.sync.

    What is read from memory, what is read from L2, where each block finds x, and what the SM does
    that has the most blocks, of which the longest counts most. Fitted to every config on an H100
    (benchmarks/results/h100-packed_configs.jsonl), of which what it takes for the fastest is 2.4 %
    slower than that on average, 13 % at worst; the rate of memory is an H200's.
    """
    columns, warps_k, cluster = config.tile_n, config.warps_k, config.cluster_k
    # Of experts, which have more or fewer rows than the mean, twice that (packed.cc).
    mean = problem.rows_of_weight
    wanted = mean * (2 if problem.form == "grouped" else 1)
    rows = next((rows for rows in _PACKED_RATES if wanted <= rows), max(_PACKED_RATES))
    passes, across = -(-mean // rows), problem.weights_read * -(-problem.n // columns)
    blocks = across * passes * cluster
    weight = problem.weights_read * problem.n * problem.k * problem.bits // 8
    from_l2 = passes * (weight + across * rows * problem.k * 2)
    # Blocks have whole stages of K.
    stages = -(-problem.k // (128 * warps_k))
    of_block = weight / across * -(-stages // cluster) / stages
    # Of the SMs that a GPC has, not all are in a cluster of four or more.
    rounds = math.ceil(blocks / (num_sms if cluster < 4 else 0.965 * num_sms))
    each = of_block / (_PACKED_RATES[rows] * problem.bits / 4)
    # Eight warps alone do not hide each other's latencies.
    each *= 1.16 if columns // 32 * warps_k * rounds < 16 else 1
    # Sixteen have few registers for 32 rows.
    each *= 1.19 if columns // 32 * warps_k >= 16 and rows == 32 else 1
    # What a block begins and ends with, and what those of a cluster send each other.
    each += 0.51 + 0.45 * (cluster - 1) * rows * columns / 1e4
    # Sixteen warps have no block beside them that multiplies while they look for their expert.
    each += 0.7 if problem.form == "grouped" and columns // 32 * warps_k >= 16 else 0
    busiest = rounds * each + 0.44 * math.log2(cluster)
    parts = (weight / 3.7e6, from_l2 / 5.6e6, busiest)
    return 2.0 + sum(part**4 for part in parts) ** 0.25


# Those of wgmma: the rows from which on they are taken, below which the others read the weight
# about as fast as memory delivers it; what launches take, and what a block begins and ends with.
_WIDE_FROM, _WIDE_LAUNCHES_US, _WIDE_BLOCK_US = 33, 3.6, 0.5
# More rows of 16 bits are faster by kernels that dequantize the weight first, with all formats and
# shapes measured on an H200.
_WIDE_TO = 128


def _wide_packed_us(problem: PackedProblem, num_sms: int, config: WidePackedConfig) -> float:
    """Of kernels that multiply by wgmma: the same parts.

    What an SM does are clocks of instructions, 4 for each row of 64 columns and 128 of K, and of
    what scales their sums, beside which conversion is hidden. Fitted to every config on an H100
    (benchmarks/results/h100-packed_wide_configs.jsonl), of which the one that is taken for the
    fastest is 2 % slower than that on average, 6 % at worst.
    """
    columns, rows, cluster = config.tile_n, config.tile_m, config.cluster_k
    multicast_size = config.multicast_size
    mean = problem.rows_of_weight
    x_bytes = DTYPES[problem.in_dtype].itemsize
    if x_bytes == 2 and not _WIDE_FROM <= mean <= _WIDE_TO:
        return math.inf
    passes, across = -(-mean // rows), problem.weights_read * -(-problem.n // columns)
    blocks = across * passes * cluster
    weight = problem.weights_read * problem.n * problem.k * problem.bits // 8
    from_l2 = passes * (weight + across / multicast_size * rows * problem.k * x_bytes)
    # Of 8-bit floats whole columns, too, have sums of parts.
    has_parts = problem.group_size < problem.k or x_bytes == 1
    parts_of_stage = max(128 // problem.group_size, 1) if has_parts else 0
    clocks = columns // 64 * rows * (2 * x_bytes + 1.8 * parts_of_stage)
    stages = math.ceil(math.ceil(problem.k / 128) / cluster)
    each = stages * clocks / 1700 + _WIDE_BLOCK_US + 0.5 * (cluster - 1) * rows * columns / 1e4
    sms = num_sms if cluster < 4 else 0.965 * num_sms
    if rows <= 64 and columns <= 128:
        # An SM has two, of which one alone takes more than half of what both do.
        pairs, left = divmod(blocks, 2 * sms)
        busiest = each * (2 * pairs + (0 if not left else 1.18 if left <= sms else 2))
    else:
        busiest = each * math.ceil(blocks / sms)
    # Of 8-bit floats there is half as much to share, and to wait for it takes as long.
    busiest *= 1.04 if x_bytes == 1 and multicast_size > 1 else 1
    parts = (weight / 3.7e6, from_l2 / (7.3e6 if x_bytes == 2 else 9e6), busiest)
    # Blocks that share wait for each other.
    return _WIDE_LAUNCHES_US + sum(part**4 for part in parts) ** 0.25 + 1.1 * (multicast_size - 1)


# Clocks that 64 of K of 128 columns take by rows of the CTA tile, of a CTA that has an SM for
# itself and of two CTAs that share one.
_CLOCKS_ALONE = {64: 494, 96: 553, 128: 784, 160: 684, 192: 777, 224: 849, 256: 996}
_CLOCKS_OF_TWO = {64: 845, 96: 964, 128: 1182}
# Bytes of an SM's shared memory for each of two CTAs, where all accumulators of a tile have to fit.
_SHARED_BYTES_OF_TWO = 111 * 1024


def _dequantizing_packed_us(
    problem: PackedProblem, num_sms: int, config: WidePackedConfig
) -> float:
    """Estimate kernels that dequantize the weight before they multiply.

    Fitted to every config on an H200 (benchmarks/results/h200-packed_dequantizing_configs.jsonl),
    of which the selected one is 0.4 % slower than the fastest on average, 10 % at worst.
    """
    columns, rows, cluster = config.tile_n, config.tile_m, config.cluster_k
    mean = problem.rows_of_weight
    if mean < _WIDE_FROM:
        return math.inf
    passes, across = -(-mean // rows), problem.weights_read * -(-problem.n // columns)
    blocks = across * passes * cluster
    weight = problem.weights_read * problem.n * problem.k * problem.bits // 8
    from_l2 = passes * (weight + across * rows * problem.k * 2)
    stages = math.ceil(math.ceil(problem.k / 64) / cluster)
    us_per_clock = (1.05 if problem.bits == 8 else 1) / 1700
    # What a CTA begins and ends with, and what those of a cluster send each other.
    end = 0.87 + 6.18 * rows / 256 + 0.15 * (cluster - 1) * rows * columns / 1e4
    alone = stages * _CLOCKS_ALONE[rows] * us_per_clock + end
    # Of the SMs that a GPC has, not all are in a cluster of four or more.
    sms = num_sms * (1 if cluster < 4 else 0.965 if cluster < 8 else 0.93)
    accumulators = rows * 4 * (columns + 4 + (cluster - 1) * columns // cluster)
    if rows in _CLOCKS_OF_TWO and accumulators <= _SHARED_BYTES_OF_TWO:
        both = stages * _CLOCKS_OF_TWO[rows] * us_per_clock + end
        pairs, left = divmod(blocks, 2 * sms)
        busiest = pairs * both + (0 if not left else alone if left <= sms else both)
    else:
        busiest = alone * math.ceil(blocks / sms)
    parts = (weight / 3.1e6, from_l2 / 7.9e6, busiest)
    return 1.0 + sum(part**4 for part in parts) ** 0.25
