"""The public `contract`."""

import jax

from jax_tcgemm.primitives import contract as primitive
from jax_tcgemm.problem import modes, operators
from jax_tcgemm.problem.compute_types import CONTRACTION_COMPUTE, check_compute_type
from jax_tcgemm.problem.precision import canonical_precision
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
    """Contracts two arrays over named modes, and adds a third.

        D[result] = alpha * sum of op_a(A[a]) * op_b(B[b]) + beta * C[result]

    summed over the modes that the result lacks. It can be differentiated any number of times and
    batched by `jax.vmap`, where a mapped dimension becomes one more mode and is not a loop.

    Args:
      subscripts: the modes of a, b and the result, one letter each, such as `"mhkn,ukvh->munv"`.
        Each mode is in at least two of the three, and at most once in each.
      a: floating-point or complex array, with at most 64 modes, as all arrays here.
      b: floating-point or complex array; both are promoted to one dtype.
      c: array of the result's shape, or None. Required for a `beta` other than 0, and else not
        read.
      alpha: a number, complex for complex arrays only.
      beta: a number, likewise.
      op_a: an operator applied to each element of a: identity, conj, sqrt, relu, rcp, sigmoid,
        tanh, exp, log, abs, neg, sin, cos, tan, sinh, cosh, asin, acos, atan, asinh, acosh, atanh,
        ceil, floor, mish, swish, softplus or softsign. cuTENSOR applies identity and conj while it
        reads; any other one is a pass of its own over the array.
      op_b: likewise for b.
      compute_type: None takes `jax.default_matmul_precision`, as XLA does. For float32 one of f32,
        tf32, 3xtf32, bf16, f16, 9xbf16 and 4xf16; for float64 f64, f32 and 8xint8; for complex
        arrays those of their parts but bf16 and f16; for float16 and bfloat16 f32. What the GPU has
        not, cuTENSOR refuses. Our products have f32, tf32, f64 and, as sums of parts, 3xtf32 and
        9xbf16; they and XLA run a type they do not have in a better one.
      algorithm: of cuTENSOR: default, default_patient, gett, tgett or ttgt; needs
        `implementation="cutensor"`.
      out_sharding: sharding of the result, for meshes with explicit axes. Where a mode that is
        summed over is divided, it says how the sum over devices is; c is added after it.
      implementation: "cutensor"; "gemm", one of our matrix products, after a copy of what it cannot
        read in place; "xla"; or None, which takes the one predicted to be fastest.
        `jax_tcgemm.explain` says which and why. Derivatives inherit it.

    Returns:
      D, in the dtype of a and b.

    Raises:
      TypeError: for operands that are no floating-point arrays, or scalars that are no numbers.
      ValueError: for subscripts that do not fit, a mode in one array only, too many modes, an
        unknown operator, compute type, algorithm or implementation, or, when the program is
        lowered, an implementation that was asked for by name and cannot run it.

    Numerics:
      float16 and bfloat16 are multiplied exactly, accumulated in float32 and rounded once. float32
      and complex64 use TF32 on CUDA, as XLA does, unless the precision is highest or a preset of
      several products, such as BF16_BF16_F32_X3 (see `dot_general`), or `compute_type` says
      otherwise; on CPU they are always float32. The same program on the same device gives the same
      bits each time.

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
