"""Forms of XLA's own product without an epilogue, as configs of the implementation "xla".

    default     a dot of the operands
    broadcast   the sum over k of broadcast products, which XLA fuses with neighboring operations
    bfloat16    the dot of 8-bit integers as bfloat16, with exact accumulators in float32
    int32       the dot of 8-bit integers converted to int32

XLA's dot is slow or wrong for some products. Batches of tiny matrices run in a library that takes
up to forty times as long as their memory traffic. The dot of 8-bit integers is wrong for some K
that are no multiple of four, and slow for small K. For tiny 16-bit products, XLA converts each
operand by a kernel of its own.
"""

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Problem

DEFAULT, BROADCAST, BFLOAT16, INT32 = FORMS = ("default", "broadcast", "bfloat16", "int32")

# The largest M, N or K for the form broadcast.
_MOST_EXTENT = 16
# The least batch for the form broadcast.
_LEAST_BATCH = 16
# Up to this K, terms are added one after another; a larger K is a reduction.
MOST_TERMS = 8
# The largest m * n * k for which broadcasting was fastest: for K up to `MOST_TERMS`, and up to 12.
_MOST_OF_FEW_TERMS, _MOST_OF_TWELVE = 768, 1872
# A batch of this many bytes stays in L2 while its lines are read repeatedly.
_MOST_SCATTERED_BYTES = 1 << 24
# Up to this m * n, any K up to `_MOST_EXTENT` is fast.
_FEW_RESULTS = 16
# Up to this many elements, m * n * k, XLA runs neither a library nor tensor cores for a product.
MOST_OF_TINY = 512
# A launch, and the fraction of memory bandwidth that XLA's loop reaches on an H200: for K up to 4,
# or where both operands are read along rows; for larger K in other layouts; and for K above
# MOST_TERMS (float32 39017x11x11x11 NN: 109 us, memory traffic 12 us).
_LAUNCH_US = 1.4
_BANDWIDTH, _BANDWIDTH_ACROSS, _BANDWIDTH_OF_MANY_TERMS = 0.75, 0.6, 0.12
_FEW_TERMS = 4
# The largest K for which 8-bit integers are multiplied faster as bfloat16 than by XLA's own dot.
_MOST_OF_INT8 = 64
# The largest magnitude of an integer by dtype. Float32 accumulators are exact up to 2^24.
_LARGEST = {"s8": 128, "u8": 255}
_EXACT = 2**24


def obstacle(form: str, problem: Problem) -> str:
    """Return why a problem cannot be computed in a form; "" if it can."""
    if form == DEFAULT:
        return ""
    if not problem.is_bare:
        return f"form {form} is of products alone"
    if form == BROADCAST:
        largest = max(problem.m, problem.n, problem.k)
        is_of_one = problem.a.dtype == problem.b.dtype or problem.compute == "s32"
        if problem.compute not in ("f32", "tf32", "f64", "s32") or not is_of_one:
            return "it multiplies numbers of one dtype by their own precision"
        is_small = largest <= _MOST_EXTENT or is_tiny_int8(problem)
        return "" if is_small else f"an extent is {largest}, not {_MOST_EXTENT} at most"
    largest = [_LARGEST.get(x.dtype) for x in (problem.a, problem.b)]
    if None in largest or problem.compute != "s32":
        return "it multiplies 8-bit integers"
    if form == INT32:
        return ""
    most = _EXACT // (largest[0] * largest[1])
    return "" if problem.k <= most else f"k is {problem.k}, not {most} at most"


def broadcast_pays(problem: Problem) -> bool:
    """Return whether the form broadcast was measured fastest for a batch of tiny matrices.

    Measured on an H100, and for large batches on an H200.
    """
    m, n, k = problem.m, problem.n, problem.k
    if obstacle(BROADCAST, problem) or problem.batch < _LEAST_BATCH or min(m, n, k) < 2:
        return False
    if max(m, n, k) > _MOST_EXTENT:
        return False
    # Reads of a transposed operand touch many lines at a time. That is slow where the lines do not
    # stay in L2 (broadcast and XLA's dot on an H200: 64000x8x8x8 TT float64, 111 and 51 us;
    # 1380x6x6x6 TN, 1.7 and 2.3 us; 39017x11x11x11 NT float32, 112 and 37 us).
    if problem.bytes > _MOST_SCATTERED_BYTES:
        if problem.a.dtype == "f64" and problem.a.transposed:
            return False
        is_long = k > MOST_TERMS and m * n > _FEW_RESULTS
        if problem.a.dtype == "f32" and problem.b.transposed and is_long:
            return False
    if k <= MOST_TERMS:
        return m * n * k <= _MOST_OF_FEW_TERMS
    is_complex = problem.a.dtype in ("c64", "c128")
    # A reduction over the first dimension of A is slow (43092x9x9x9 TN: 88 us, XLA's dot 60 us).
    is_slow = problem.a.dtype == "f64" and problem.a.transposed
    return (
        m * n <= _FEW_RESULTS
        or (is_complex and max(m, n) <= _MOST_EXTENT)
        or (not is_slow and k <= 12 and m * n * k <= _MOST_OF_TWELVE)
    )


def is_tiny_int8(problem: Problem) -> bool:
    """Return whether an 8-bit integer product is so small that XLA's dot runs no library."""
    m, n, k = problem.m, problem.n, problem.k
    return problem.compute == "s32" and min(m, n, k) > 1 and m * n * k <= MOST_OF_TINY


def is_reduction(problem: Problem) -> bool:
    """Return whether the form broadcast adds its terms by a reduction.

    Unrolled sums of many terms of 8 bytes or more would need too many registers.
    """
    if problem.k > _MOST_EXTENT:
        return True
    is_wide = DTYPES[problem.a.dtype].itemsize >= 8
    return problem.k > MOST_TERMS and is_wide and problem.m * problem.n > _FEW_RESULTS


def broadcast_is_fast(problem: Problem) -> bool:
    """Return whether the form broadcast has few terms and reads both operands along rows."""
    return problem.k <= MOST_TERMS and problem.layout == "NN"


def broadcast_us(problem: Problem, bytes_per_us: float) -> float:
    """Estimate the time of the form broadcast in microseconds."""
    if problem.k > MOST_TERMS:
        bandwidth = _BANDWIDTH_OF_MANY_TERMS
    else:
        is_along = problem.layout == "NN" or problem.k <= _FEW_TERMS
        bandwidth = _BANDWIDTH if is_along else _BANDWIDTH_ACROSS
    return _LAUNCH_US + problem.bytes / (bandwidth * bytes_per_us)


def own(problem: Problem) -> str:
    """Return XLA's default form of a problem on a GPU.

    XLA's dot of 8-bit integers may be wrong if K is no multiple of four: errors were as large as
    the largest result (145x10x2 NT, 2x10x47 NN, 85x17x5 NT; H100, JAX 0.11.2).
    """
    return INT32 if problem.compute == "s32" and problem.k % 4 else DEFAULT


def of_int8(problem: Problem) -> str:
    """Return XLA's fastest correct form for 8-bit integers (H100).

    Tiny products are one loop, both as XLA's dot (3x3x3: 1.2 us, H200) and in the form broadcast;
    as bfloat16, operands would be converted by kernels of their own.
    """
    is_right = own(problem) == DEFAULT
    if is_tiny_int8(problem):
        return DEFAULT if is_right and problem.batch == 1 else BROADCAST
    return DEFAULT if is_right and problem.k > _MOST_OF_INT8 else BFLOAT16
