"""Rules from measurements, for problems that neither a table nor the GEMM cost model covers."""

import math
import sys

from jax_tcgemm.problem.blas.call import DEFAULT_OPTIONS
from jax_tcgemm.problem.blas.problem import BlasProblem
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.operands.packed import PackedProblem
from jax_tcgemm.problem.ragged import RaggedProblem
from jax_tcgemm.selection.configs import (
    PackedConfig,
    WgmmaConfig,
    WidePackedConfig,
    parse_or_none,
)
from jax_tcgemm.selection.implementations import AnyProblem, Candidate

# A batch takes one launch per entry, unless it folds into one call (csrc/core/blas.cc).
_NOT_BATCHED_IN_CUBLAS = ("iamax", "iamin", "asum", "nrm2", "swap", "gbmv")


def on_cpu(problem: AnyProblem, considered) -> tuple[Candidate, str]:
    """Select for a CPU: `host` where it was measured to be faster than XLA; else XLA."""
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
    """Return whether `host` took at most about 0.8 of XLA:CPU's time, with AVX2 and AVX-512.

    A custom call costs 1 to 2 µs where XLA would inline the product, and prevents fusion with the
    operations that follow. So `host` gains only for enough work that XLA:CPU runs slowly:

    * batches of products from 4x4x4 to below 8x8x8;
    * a transposed A with few columns of B;
    * a 16-bit matrix times a vector;
    * 8-bit integers with a transposed A;
    * complex numbers;
    * grouped products, for which XLA multiplies every row by every group's matrix;
    * banded and triangular BLAS routines, and nrm2.

    uint8 and complex128 have the rules of int8 and complex64. csrc/cpu/README.md has figures.
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
    """Select for BLAS calls on a GPU: cuBLAS, except where it was measured slower than XLA.

    Calls with options always run cuBLAS. cuBLAS takes over a hundred times as long as XLA for gbmv,
    and 1.3 times as long for gemv with a float32 matrix that is not transposed
    (benchmarks/results/h200-blas.jsonl).
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
    """Return whether a config's tiles have 256 tokens where 64 are faster, or the reverse."""
    if candidate.implementation != "wgmma":
        return False
    is_narrow = WgmmaConfig.parse(candidate.config).tile_n == 64
    return is_narrow != _is_for_narrow(problem, num_sms)


def _is_for_narrow(problem: RaggedProblem, num_sms: int) -> bool:
    """Return whether tiles of 64 tokens are faster than tiles of 256.

    For groups of few tokens, both tiles read each weight once, and narrow tiles have more stages.
    If there are fewer tiles of 256 tokens than SMs, narrow tiles use more SMs. With a short K, most
    of the time is not multiplication, so that narrow tiles halve it (H100).
    """
    if problem.form != "rows":
        return False
    if problem.tokens <= 32 * problem.groups:
        return True
    # On average half a tile of each group is empty.
    tiles = (problem.tokens / 256 + problem.groups / 2) * -(-problem.n // 128)
    most = (0.9 if problem.k <= 512 else 0.5) * num_sms
    # Only wide tiles run epilogue functions.
    return problem.function is None and tiles <= most


# Bytes of a 4-bit weight that an SM multiplies per microsecond, by rows of x in a CTA tile.
_PACKED_RATES = {8: 32.8e3, 16: 26.4e3, 32: 19.5e3}


# Stands for an unknown time; longer than every estimate.
UNKNOWN_US = sys.float_info.max

# Above this many rows of x per weight, XLA's program, which dequantizes the weight once, is faster
# than kernels that read the weight again for every 32 rows.
_MOST_NARROW_ROWS = 512


def packed_us(problem: PackedProblem, num_sms: int, candidate: Candidate) -> float:
    """Estimate a config for weight-only quantization in microseconds, to order the configs.

    XLA's program has `UNKNOWN_US`: it follows all kernels with an estimate, and precedes those with
    an infinite one, which are to be avoided.
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
    """Estimate kernels that multiply by mma.sync, in microseconds.

    The estimate is a norm of three times: reads from memory, reads from L2 (from which every CTA
    reads x), and the work of the SM with the most CTAs. Constants were fitted to every config on an
    H100 (benchmarks/results/h100-packed_configs.jsonl): the selected config is 2.4 % slower than
    the fastest on average, 13 % at worst. The memory bandwidth is an H200's.
    """
    columns, warps_k, cluster = config.tile_n, config.warps_k, config.cluster_k
    # Experts' row counts vary, so that the kernel is selected for twice the mean (packed.cc).
    mean = problem.rows_of_weight
    wanted = mean * (2 if problem.form == "grouped" else 1)
    rows = next((rows for rows in _PACKED_RATES if wanted <= rows), max(_PACKED_RATES))
    passes, across = -(-mean // rows), problem.weights_read * -(-problem.n // columns)
    blocks = across * passes * cluster
    weight = problem.weights_read * problem.n * problem.k * problem.bits // 8
    from_l2 = passes * (weight + across * rows * problem.k * 2)
    # CTAs of a cluster split K at multiples of a stage.
    stages = -(-problem.k // (128 * warps_k))
    of_block = weight / across * -(-stages // cluster) / stages
    # Clusters of four or more cannot use all SMs of a GPC.
    rounds = math.ceil(blocks / (num_sms if cluster < 4 else 0.965 * num_sms))
    each = of_block / (_PACKED_RATES[rows] * problem.bits / 4)
    # Eight warps alone on an SM do not hide each other's latencies.
    each *= 1.16 if columns // 32 * warps_k * rounds < 16 else 1
    # Conversion of floats keeps eight warps of two CTAs busier than sixteen of one (mxfp4, H200).
    each *= 1.08 if columns // 32 * warps_k >= 16 and problem.code != "integer" else 1
    # Sixteen warps have few registers each for 32 rows.
    each *= 1.19 if columns // 32 * warps_k >= 16 and rows == 32 else 1
    # Start and end of a CTA, and the exchange of accumulators within a cluster.
    each += 0.51 + 0.45 * (cluster - 1) * rows * columns / 1e4
    # With sixteen warps, no other CTA on the SM hides the search for the expert.
    each += 0.7 if problem.form == "grouped" and columns // 32 * warps_k >= 16 else 0
    busiest = rounds * each + 0.44 * math.log2(cluster)
    times = (weight / 3.7e6, from_l2 / 5.6e6, busiest)
    return 2.0 + sum(us**4 for us in times) ** 0.25


# Kernels with wgmma: the least rows for which they run, since with fewer rows mma.sync kernels read
# the weight at about memory bandwidth; the launches; the start and end of a CTA.
_WIDE_FROM, _WIDE_LAUNCHES_US, _WIDE_BLOCK_US = 33, 3.6, 0.5
# Above this many rows of 16-bit x, kernels that dequantize the weight in shared memory are faster,
# for all formats and shapes measured on an H200.
_WIDE_TO = 128


def _wide_packed_us(problem: PackedProblem, num_sms: int, config: WidePackedConfig) -> float:
    """Estimate kernels that multiply by wgmma and convert the weight in registers, in microseconds.

    The estimate is the norm of `_narrow_packed_us`. The work of an SM is the clocks of wgmma, 4 for
    each row of x, 64 columns and 128 of K with 16-bit x and 2 with 8-bit floats, and of scaling the
    accumulators; conversion of the weight is hidden. Constants were fitted to every config on an
    H100 (benchmarks/results/h100-packed_wide_configs.jsonl): the selected config is 2 % slower than
    the fastest on average, 6 % at worst.
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
    # With 8-bit floats, accumulators are promoted even where whole columns share a scale.
    promotes = problem.group_size < problem.k or x_bytes == 1
    promotions = max(128 // problem.group_size, 1) if promotes else 0  # of a stage
    clocks = columns // 64 * rows * (2 * x_bytes + 1.8 * promotions)
    stages = math.ceil(math.ceil(problem.k / 128) / cluster)
    each = stages * clocks / 1700 + _WIDE_BLOCK_US + 0.5 * (cluster - 1) * rows * columns / 1e4
    sms = num_sms if cluster < 4 else 0.965 * num_sms
    if rows <= 64 and columns <= 128:
        # Two CTAs share an SM; one CTA alone takes 0.59 of the time of both.
        pairs, left = divmod(blocks, 2 * sms)
        busiest = each * (2 * pairs + (0 if not left else 1.18 if left <= sms else 2))
    else:
        busiest = each * math.ceil(blocks / sms)
    # With 8-bit floats, multicast saves half as many bytes and waits as long.
    busiest *= 1.04 if x_bytes == 1 and multicast_size > 1 else 1
    times = (weight / 3.7e6, from_l2 / (7.3e6 if x_bytes == 2 else 9e6), busiest)
    # CTAs of a multicast wait for each other.
    return _WIDE_LAUNCHES_US + sum(us**4 for us in times) ** 0.25 + 1.1 * (multicast_size - 1)


# Clocks for 128 columns and 64 of K, by rows of the CTA tile: of a CTA alone on an SM, and of two
# CTAs that share an SM.
_CLOCKS_ALONE = {64: 494, 96: 553, 128: 784, 160: 684, 192: 777, 224: 849, 256: 996}
_CLOCKS_OF_TWO = {64: 845, 96: 964, 128: 1182}
# Shared memory in bytes of each of two CTAs on an SM, into which all accumulators must fit.
_SHARED_BYTES_OF_TWO = 111 * 1024


def _dequantizing_packed_us(
    problem: PackedProblem, num_sms: int, config: WidePackedConfig
) -> float:
    """Estimate kernels that dequantize the weight in shared memory, in microseconds.

    Constants were fitted to every config on an H200
    (benchmarks/results/h200-packed_dequantizing_configs.jsonl): the selected config is 0.4 % slower
    than the fastest on average, 10 % at worst.
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
    # Start and end of a CTA, and the exchange of accumulators within a cluster.
    end = 0.87 + 6.18 * rows / 256 + 0.15 * (cluster - 1) * rows * columns / 1e4
    alone = stages * _CLOCKS_ALONE[rows] * us_per_clock + end
    # Clusters of four or more cannot use all SMs of a GPC.
    sms = num_sms * (1 if cluster < 4 else 0.965 if cluster < 8 else 0.93)
    accumulators = rows * 4 * (columns + 4 + (cluster - 1) * columns // cluster)
    if rows in _CLOCKS_OF_TWO and accumulators <= _SHARED_BYTES_OF_TWO:
        both = stages * _CLOCKS_OF_TWO[rows] * us_per_clock + end
        pairs, left = divmod(blocks, 2 * sms)
        busiest = pairs * both + (0 if not left else alone if left <= sms else both)
    else:
        busiest = alone * math.ceil(blocks / sms)
    times = (weight / 3.1e6, from_l2 / 7.9e6, busiest)
    return 1.0 + sum(us**4 for us in times) ** 0.25
