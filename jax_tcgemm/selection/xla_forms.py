"""The forms in which XLA is asked for a bare product, as configs of the implementation "xla".

    default     its own dot of the operands
    broadcast   the sum over k of broadcast products, which XLA fuses with what is around it
    bfloat16    the dot of 8-bit integers as bfloat16, whose sums are exact in float32
    int32       the dot of 8-bit integers as 32-bit ones

XLA hands batches of tiny matrices to a library that takes up to forty times as long as memory does.
Its dot of 8-bit integers is wrong for some k that four does not divide, and slow where it is small.
Of tiny products of 16 bits it converts each operand by a kernel of its own.
"""

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Problem

DEFAULT, BROADCAST, BFLOAT16, INT32 = FORMS = ("default", "broadcast", "bfloat16", "int32")

# The largest extent of a matrix that is multiplied by broadcasting.
_MOST_EXTENT = 16
# Fewer products than this are no batch to speak of.
_LEAST_BATCH = 16
# Up to this k its terms are added one after the other; more are a reduction.
MOST_TERMS = 8
# Elements of one product, m * n * k, up to which broadcasting was the fastest: of few terms, and of
# up to twelve.
_MOST_OF_FEW_TERMS, _MOST_OF_TWELVE = 768, 1872
# A batch of as many bytes stays in L2 while its lines are read again and again.
_MOST_SCATTERED_BYTES = 1 << 24
# Below this many elements of a result any k up to `_MOST_EXTENT` is fast.
_FEW_RESULTS = 16
# Up to this many elements, m * n * k, XLA runs neither a library nor tensor cores for a product.
MOST_OF_TINY = 512
# Up to this many elements, m * n * k, XLA runs neither a library nor tensor cores for a product.
MOST_OF_TINY = 512
# A launch, and the part of the memory's bandwidth that such a loop reaches (H200): of up to four
# terms, or where both operands are read along rows; of more in other layouts; and of more than
# MOST_TERMS (float32: 39017x11x11x11 NN 109 us, where memory takes 12).
_LAUNCH_US = 1.4
_BANDWIDTH, _BANDWIDTH_ACROSS, _BANDWIDTH_OF_MANY_TERMS = 0.75, 0.6, 0.12
_FEW_TERMS = 4
# The largest k for which 8-bit integers are multiplied faster as bfloat16 than by XLA's own dot.
_MOST_OF_INT8 = 64
# The largest product of two numbers, by whether they have a sign; float32 sums are exact to 2^24.
_LARGEST = {"s8": 128, "u8": 255}
_EXACT = 2**24


def obstacle(form: str, problem: Problem) -> str:
    """Why a problem cannot be computed in a form; "" if it can."""
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
    """Whether a batch of tiny matrices was measured to be the fastest in that form, on an H100."""
    m, n, k = problem.m, problem.n, problem.k
    if obstacle(BROADCAST, problem) or problem.batch < _LEAST_BATCH or min(m, n, k) < 2:
        return False
    if max(m, n, k) > _MOST_EXTENT:
        return False
    # Threads read columns of A, or rows of B's transpose, many lines at a time. That is slow where
    # these do not stay in L2 (64000x8x8x8 TT float64: 111 us, XLA's dot 51; 1380x6x6x6 TN: 1.7 and
    # 2.3; 39017x11x11x11 NT float32: 112 and 37; H200).
    if problem.bytes > _MOST_SCATTERED_BYTES:
        if problem.a.dtype == "f64" and problem.a.transposed:
            return False
        is_long = k > MOST_TERMS and m * n > _FEW_RESULTS
        if problem.a.dtype == "f32" and problem.b.transposed and is_long:
            return False
    if k <= MOST_TERMS:
        return m * n * k <= _MOST_OF_FEW_TERMS
    is_complex = problem.a.dtype in ("c64", "c128")
    # XLA's reduction over the first dimension of each matrix (43092x9x9x9 TN: 88 us, its dot 60).
    is_slow = problem.a.dtype == "f64" and problem.a.transposed
    return (
        m * n <= _FEW_RESULTS
        or (is_complex and max(m, n) <= _MOST_EXTENT)
        or (not is_slow and k <= 12 and m * n * k <= _MOST_OF_TWELVE)
    )


def is_tiny_int8(problem: Problem) -> bool:
    """Whether a product of 8-bit integers is so small that XLA runs no library for its own dot."""
    m, n, k = problem.m, problem.n, problem.k
    return problem.compute == "s32" and min(m, n, k) > 1 and m * n * k <= MOST_OF_TINY


def is_reduction(problem: Problem) -> bool:
    """Whether the form broadcast adds up its terms by a reduction.

    Unrolled sums of many 8-byte numbers read more registers than there are.
    """
    if problem.k > _MOST_EXTENT:
        return True
    is_wide = DTYPES[problem.a.dtype].itemsize >= 8
    return problem.k > MOST_TERMS and is_wide and problem.m * problem.n > _FEW_RESULTS


def broadcast_is_fast(problem: Problem) -> bool:
    """Whether the form broadcast has few terms and reads both operands along rows."""
    return problem.k <= MOST_TERMS and problem.layout == "NN"


def broadcast_us(problem: Problem, bytes_per_us: float) -> float:
    """Estimated time of the form broadcast."""
    if problem.k > MOST_TERMS:
        bandwidth = _BANDWIDTH_OF_MANY_TERMS
    else:
        is_along = problem.layout == "NN" or problem.k <= _FEW_TERMS
        bandwidth = _BANDWIDTH if is_along else _BANDWIDTH_ACROSS
    return _LAUNCH_US + problem.bytes / (bandwidth * bytes_per_us)


def own(problem: Problem) -> str:
    """The form in which XLA computes a problem on a GPU where nothing is gained by another one.

    XLA's dot of 8-bit integers whose k four does not divide is not to be trusted: results were off
    by as much as the largest of them (145x10x2 NT, 2x10x47 NN, 85x17x5 NT; H100, JAX 0.11.2).
    """
    return INT32 if problem.compute == "s32" and problem.k % 4 else DEFAULT


def of_int8(problem: Problem) -> str:
    """The form in which XLA multiplies 8-bit integers fastest, of those that are right (H100).

    Tiny products are one loop, in its own dot (3x3x3: 1.2 us, H200) and in the form broadcast; as
    bfloat16, operands would be converted by kernels of their own.
    """
    is_right = own(problem) == DEFAULT
    if is_tiny_int8(problem):
        return DEFAULT if is_right and problem.batch == 1 else BROADCAST
    return DEFAULT if is_right and problem.k > _MOST_OF_INT8 else BFLOAT16
