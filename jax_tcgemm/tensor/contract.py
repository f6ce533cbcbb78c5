"""Public `contract`."""

import jax

from jax_tcgemm.primitives.tensor import contract as primitive
from jax_tcgemm.problem.compute_types import CONTRACTION_COMPUTE, check_compute_type
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.problem.tensor import modes, operators
from jax_tcgemm.products.arguments import call_options, canonical_sharding
from jax_tcgemm.tensor import arguments

ALGORITHMS = ("default", "default_patient", "gett", "tgett", "ttgt")


def contract(
    subscripts: str,
    a,
    b,
    *,
    c=None,
    alpha: complex = 1,
    beta: complex = 0,
    op_a: str = "identity",
    op_b: str = "identity",
    compute_type: str | None = None,
    algorithm: str | None = None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """Contract two arrays over named modes and add a third array.

        D[result] = alpha * sum of op_a(A[a]) * op_b(B[b]) + beta * C[result]

    The sum is over the modes that the result lacks. `contract` can be differentiated any number of
    times and batched by `jax.vmap`; a mapped dimension becomes one more mode, not a loop.

    Args:
      subscripts: the modes of a, b and the result, one letter each, such as `"mhkn,ukvh->munv"`.
        Each mode occurs in at least two of the three, and at most once in each.
      a: floating-point or complex array with at most 64 modes. The limit holds for all arrays here.
      b: floating-point or complex array. a and b are promoted to one dtype.
      c: array of the result's shape, or None. c is required if `beta` is not 0, and is otherwise
        not read.
      alpha: a number; may be complex only for complex arrays.
      beta: a number; may be complex only for complex arrays.
      op_a: an operator applied to each element of a: identity, conj, sqrt, relu, rcp, sigmoid,
        tanh, exp, log, abs, neg, sin, cos, tan, sinh, cosh, asin, acos, atan, asinh, acosh, atanh,
        ceil, floor, mish, swish, softplus or softsign. cuTENSOR applies identity and conj while
        reading; any other operator is a separate pass over the array.
      op_b: an operator applied to each element of b, one of the operators of op_a.
      compute_type: None uses `jax.default_matmul_precision`, like XLA. For float32: f32, tf32,
        3xtf32, bf16, f16, 9xbf16 or 4xf16. For float64: f64, f32 or 8xint8. For complex arrays: the
        types for their real parts, except bf16 and f16. For float16 and bfloat16: f32. cuTENSOR
        refuses types that the GPU lacks. This library's GEMMs support f32, tf32, f64 and, by
        split-precision emulation, 3xtf32 and 9xbf16. For other types, this library's GEMMs and XLA
        use a more precise type.
      algorithm: an algorithm of cuTENSOR: default, default_patient, gett, tgett or ttgt. Requires
        `implementation="cutensor"`.
      out_sharding: sharding of the result, for meshes with explicit axes. If a summed mode is
        sharded, out_sharding gives the sharding of the sum over devices; c is added after the sum.
      implementation: "cutensor"; "gemm", a GEMM of this library, after copies of operands that the
        GEMM cannot read in place; "xla"; or None, which selects the implementation with the
        shortest estimated time. `jax_tcgemm.explain` reports the implementation and the reason.
        Derivatives inherit the implementation.

    Returns:
      D, in the dtype of a and b.

    Raises:
      TypeError: if operands are not floating-point arrays, or scalars are not numbers.
      ValueError: if subscripts do not match the arrays, a mode occurs in only one array, there are
        too many modes, or an operator, compute type, algorithm or implementation is unknown. Also,
        at lowering, if the named implementation cannot run the contraction.

    Numerics:
      - float16 and bfloat16 are multiplied exactly, accumulated in float32 and rounded once.
      - float32 and complex64 use TF32 on CUDA, like XLA, unless the precision is highest or a
        preset of split-precision emulation such as BF16_BF16_F32_X3 (see `dot_general`), or
        `compute_type` is given. On a CPU, float32 and complex64 are multiplied in float32.
      - The same program gives the same bits on the same device.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import tensor
      >>> a, b = jnp.ones((3, 5, 4, 2)), jnp.ones((6, 4, 7, 5))
      >>> tensor.contract("mhkn,ukvh->munv", a, b, alpha=0.5).shape
      (3, 6, 2, 7)
    """
    op = "tensor.contract"
    a, b = arguments.arrays(op, a=a, b=b)
    operands, result = modes.parse(op, subscripts, ("a", "b"), (a.shape, b.shape))
    _check_modes(op, subscripts, operands, result)
    alpha = arguments.scalar(op, "alpha", alpha, a.dtype)
    beta = arguments.scalar(op, "beta", beta, a.dtype)
    extents = modes.extents(operands, (a.shape, b.shape))
    c = arguments.addend(op, c, beta, tuple(extents[mode] for mode in result), a.dtype)
    conj, factors = [], []
    for name, operator, x in (("op_a", op_a, a), ("op_b", op_b, b)):
        operator = operators.canonical(op, name, operator, x.dtype, operators.UNARY)
        conj.append(operator == "conj")
        factors.append(x if operator == "conj" else operators.UNARY[operator](x))
    check_compute_type(op, compute_type, a.dtype, CONTRACTION_COMPUTE)
    options = call_options(op, implementation, kind="contract")
    _check_algorithm(op, algorithm, implementation)
    return primitive.contract(
        *factors,
        *([] if c is None else [c]),
        options=options,
        modes=operands,
        result=result,
        conj=conj,
        alpha=alpha,
        beta=beta if c is not None else 0,
        compute=compute_type or "",
        precision=canonical_precision(op, None),
        out_sharding=canonical_sharding(op, out_sharding, len(result)),
        algorithm=algorithm or "default",
    )


def _check_modes(op, subscripts, operands, result):
    a, b = operands
    alone = sorted(mode for mode in {*a} ^ {*b} if mode not in result)
    if alone:
        letters = dict.fromkeys(subscripts.replace(" ", "").replace(",", "").partition("->")[0])
        names = ", ".join(list(letters)[mode] for mode in alone)
        raise ValueError(
            f"{op}: each mode must be in two of a, b and the result, got {names} in one alone of "
            f"{subscripts=}; sum over it first with jax_tcgemm.tensor.reduce"
        )


def _check_algorithm(op, algorithm, implementation):
    if algorithm is None:
        return
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(
            f"{op}: algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm=}; "
            "None is the default"
        )
    if implementation != "cutensor":
        raise ValueError(
            f'{op}: algorithm must come with implementation="cutensor", got {algorithm=} with '
            f"{implementation=}; only cuTENSOR has it"
        )
