"""The public `reduce`."""

import jax

from jax_tcgemm.primitives import reduce as primitive
from jax_tcgemm.problem import modes, operators
from jax_tcgemm.problem.compute_types import ELEMENTWISE_COMPUTE, check_compute_type
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
    """Reduces an array over modes, and adds another.

        D[result] = alpha * op over the other modes of op_a(A[a]) + beta * C[result]

    Args:
      subscripts: the modes of a and, in any order, those of the result, such as `"mhkn->hkn"`.
      a: floating-point or complex array.
      op: add, mul, max or min; the last two for real arrays only.
      c: array of the result's shape, or None. Required for a `beta` other than 0, and else not
        read.
      alpha: a number, complex for complex arrays only.
      beta: likewise.
      op_a: an operator applied to each element of a first, as `contract` takes them.
      compute_type: as `permute` takes it.
      implementation: "cutensor"; "tcgemm", our reduction kernels, for bare add, max and min over
        neighbouring modes; "xla"; or None, which is "xla": it fuses the reduction with what makes
        its operand.

    Returns:
      D, in the dtype of a.

    Raises:
      TypeError: for an operand that is no floating-point array, or scalars that are no numbers.
      ValueError: for subscripts that do not fit, an unknown operator, compute type or
        implementation, or, when the program is lowered, an implementation that cannot run it.

    Numerics:
      float16 and bfloat16 are accumulated in float32 and rounded once. "tcgemm" adds in an order
      that depends on the shape and the device alone, without atomics. Gradients of a maximum or a
      minimum are shared evenly by equal elements, as those of `jax.numpy.max`.

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
