"""The public `reduce`."""

import jax

from jax_tcgemm.primitives.tensor import reduce as primitive
from jax_tcgemm.problem.compute_types import ELEMENTWISE_COMPUTE, check_compute_type
from jax_tcgemm.problem.tensor import modes, operators
from jax_tcgemm.products.arguments import call_options
from jax_tcgemm.tensor import arguments


def reduce(
    subscripts: str,
    a,
    *,
    op: str = "add",
    c=None,
    alpha: complex = 1,
    beta: complex = 0,
    op_a: str = "identity",
    compute_type: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Reduce an array over modes and add another array.

        D[result] = alpha * op over the other modes of op_a(A[a]) + beta * C[result]

    Args:
      subscripts: the modes of a and, in any order, the modes of the result, such as `"mhkn->hkn"`.
      a: floating-point or complex array.
      op: add, mul, max or min; max and min are for real arrays only.
      c: array of the result's shape, or None. c is required if `beta` is not 0, and is otherwise
        not read.
      alpha: a number; may be complex only for complex arrays.
      beta: a number; may be complex only for complex arrays.
      op_a: an operator applied to each element of a before the reduction; see `contract`.
      compute_type: compute type; see `permute`.
      implementation: "cutensor"; "tcgemm", this library's reduction kernels, for add, max and min
        over neighboring modes without other arguments; "xla"; or None, which selects "xla", because
        XLA can fuse the reduction with the operation that computes a.

    Returns:
      D, in the dtype of a.

    Raises:
      TypeError: if the operand is not a floating-point array, or scalars are not numbers.
      ValueError: if subscripts do not match, or an operator, compute type or implementation is
        unknown. Also, at lowering, if the named implementation cannot run the operation.

    Numerics:
      - float16 and bfloat16 are accumulated in float32 and rounded once.
      - "tcgemm" adds without atomics, in an order that depends only on the shape and the device.
      - Equal elements share the gradient of a maximum or minimum evenly, as in `jax.numpy.max`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import tensor
      >>> tensor.reduce("ijk->kj", jnp.ones((4, 3, 2)), alpha=0.5)
      Array([[2., 2., 2.],
             [2., 2., 2.]], dtype=float32)
    """
    name = "tensor.reduce"
    (a,) = arguments.arrays(name, a=a)
    (term,), result = modes.parse(name, subscripts, ("a",), (a.shape,))
    op = operators.canonical(name, "op", op, a.dtype, operators.REDUCTIONS)
    op_a = operators.canonical(name, "op_a", op_a, a.dtype, operators.UNARY)
    alpha = arguments.scalar(name, "alpha", alpha, a.dtype)
    beta = arguments.scalar(name, "beta", beta, a.dtype)
    check_compute_type(name, compute_type, a.dtype, ELEMENTWISE_COMPUTE)
    options = call_options(name, implementation, kind="reduce")
    extents = modes.extents((term,), (a.shape,))
    shape = tuple(extents[mode] for mode in result)
    reduced = [mode for mode in term if mode not in result]
    if op in ("max", "min") and any(extents[mode] == 0 for mode in reduced):
        raise ValueError(
            f"{name}: a maximum or minimum must be over at least one element, got {a.shape=} with "
            f"{subscripts=}; pad it with infinities"
        )
    c = arguments.addend(name, c, beta, shape, a.dtype)
    return primitive.reduce(
        a,
        *([] if c is None else [c]),
        options=options,
        modes=term,
        result=result,
        unary=op_a,
        combine=op,
        alpha=alpha,
        beta=beta if c is not None else 0,
        compute=compute_type or "",
    )
