"""Public `permute`, `elementwise_binary` and `elementwise_trinary`."""

import jax

from jax_tcgemm.primitives.tensor import elementwise as primitive
from jax_tcgemm.problem.compute_types import ELEMENTWISE_COMPUTE, check_compute_type
from jax_tcgemm.problem.tensor import modes, operators
from jax_tcgemm.products.arguments import call_options
from jax_tcgemm.tensor import arguments


def permute(
    subscripts: str,
    a,
    *,
    alpha: complex = 1,
    op_a: str = "identity",
    compute_type: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Permute the modes of an array, apply an operator, and scale the result.

        D[result] = alpha * op_a(A[a])

    Args:
      subscripts: the modes of a and of the result, such as `"mhkn->nkhm"`, with the same letters.
      a: floating-point or complex array.
      alpha: a number; may be complex only for complex arrays.
      op_a: an operator applied to each element; see `contract`.
      compute_type: f64 for float64 and complex128; f32 for all other dtypes. float16 and bfloat16
        can also use their own type. None selects f64 or f32. XLA always uses f64 or f32.
      implementation: "cutensor"; "tcgemm", this library's transposition kernel, for permutations
        that move the fastest mode, without operator and alpha; "xla"; or None, which selects "xla",
        because XLA can fuse the permutation with neighboring operations.

    Returns:
      D, in the dtype of a.

    Raises:
      TypeError: if the operand is not a floating-point array, or a scalar is not a number.
      ValueError: if subscripts do not match, or an operator, compute type or implementation is
        unknown. Also, at lowering, if the named implementation cannot run the operation.

    Numerics:
      float16 and bfloat16 are computed in float32 and rounded once.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import tensor
      >>> tensor.permute("ij->ji", jnp.arange(6.0).reshape(2, 3), alpha=2)
      Array([[ 0.,  6.],
             [ 2.,  8.],
             [ 4., 10.]], dtype=float32)
    """
    op = "tensor.permute"
    (a,) = arguments.arrays(op, a=a)
    operands, result = modes.parse(op, subscripts, ("a",), (a.shape,))
    if len(result) != len(operands[0]):
        raise ValueError(
            f"{op}: the result must have every mode of a, got {subscripts=}; sum over modes with "
            "jax_tcgemm.tensor.reduce"
        )
    return _bind(
        op,
        {"a": a},
        operands,
        result,
        unary={"op_a": op_a},
        combine={},
        scalars={"alpha": alpha, "beta": 0, "gamma": 1},
        compute_type=compute_type,
        implementation=implementation,
    )


def elementwise_binary(
    subscripts: str,
    a,
    c,
    *,
    op: str = "add",
    alpha: complex = 1,
    gamma: complex = 1,
    op_a: str = "identity",
    op_c: str = "identity",
    compute_type: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Combine two arrays element by element, each with its own order of modes.

        D[result] = op(alpha * op_a(A[a]), gamma * op_c(C[c]))

    Args:
      subscripts: the modes of a, c and the result, such as `"nkhm,mhkn->mhkn"`. An operand is
        broadcast along modes that the operand lacks. Each mode of an operand must be a mode of the
        result.
      a: floating-point or complex array.
      c: floating-point or complex array. a and c are promoted to one dtype.
      op: add, mul, max or min; max and min are for real arrays only.
      alpha: a number; may be complex only for complex arrays.
      gamma: a number; may be complex only for complex arrays.
      op_a: an operator applied to each element of a; see `contract`.
      op_c: an operator applied to each element of c; see `contract`.
      compute_type: compute type; see `permute`.
      implementation: "cutensor", which requires c to have the modes of the result in the same
        order; "xla"; or None, which selects "xla", because XLA can fuse the operation with
        neighboring operations.

    Returns:
      D, in the dtype of the operands.

    Raises:
      TypeError: if operands are not floating-point arrays, or scalars are not numbers.
      ValueError: under the conditions of `permute`.

    Numerics:
      float16 and bfloat16 are computed in float32 and rounded once. On XLA, the maximum or minimum
      of any number and NaN is NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import tensor
      >>> a, c = jnp.ones((3, 2)), jnp.ones((2, 3))
      >>> tensor.elementwise_binary("ji,ij->ij", a, c, alpha=1.5, gamma=0.5)
      Array([[2., 2., 2.],
             [2., 2., 2.]], dtype=float32)
    """
    name = "tensor.elementwise_binary"
    a, c = arguments.arrays(name, a=a, c=c)
    operands, result = modes.parse(name, subscripts, ("a", "c"), (a.shape, c.shape))
    return _bind(
        name,
        {"a": a, "c": c},
        operands,
        result,
        unary={"op_a": op_a, "op_c": op_c},
        combine={"op": op},
        scalars={"alpha": alpha, "beta": 0, "gamma": gamma},
        compute_type=compute_type,
        implementation=implementation,
    )


def elementwise_trinary(
    subscripts: str,
    a,
    b,
    c,
    *,
    op_ab: str = "add",
    op_abc: str = "add",
    alpha: complex = 1,
    beta: complex = 1,
    gamma: complex = 1,
    op_a: str = "identity",
    op_b: str = "identity",
    op_c: str = "identity",
    compute_type: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Combine three arrays element by element, each with its own order of modes.

        D[result] = op_abc(op_ab(alpha * op_a(A[a]), beta * op_b(B[b])), gamma * op_c(C[c]))

    Args:
      subscripts: the modes of a, b, c and the result. An operand is broadcast along modes that the
        operand lacks. Each mode of an operand must be a mode of the result.
      a: floating-point or complex array.
      b: floating-point or complex array.
      c: floating-point or complex array. a, b and c are promoted to one dtype.
      op_ab: add, mul, max or min; max and min are for real arrays only.
      op_abc: add, mul, max or min; max and min are for real arrays only.
      alpha: a number; may be complex only for complex arrays.
      beta: a number; may be complex only for complex arrays.
      gamma: a number; may be complex only for complex arrays.
      op_a: an operator applied to each element of a; see `contract`.
      op_b: an operator applied to each element of b; see `contract`.
      op_c: an operator applied to each element of c; see `contract`.
      compute_type: compute type; see `permute`.
      implementation: name of an implementation; see `elementwise_binary`.

    Returns:
      D, in the dtype of the operands.

    Raises:
      TypeError: if operands are not floating-point arrays, or scalars are not numbers.
      ValueError: under the conditions of `permute`.

    Numerics:
      The rules of `elementwise_binary` apply.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import tensor
      >>> x, y = jnp.ones((2, 3)), jnp.ones(3)
      >>> tensor.elementwise_trinary("ij,j,ij->ij", x, y, x, op_ab="mul", gamma=2)
      Array([[3., 3., 3.],
             [3., 3., 3.]], dtype=float32)
    """
    name = "tensor.elementwise_trinary"
    a, b, c = arguments.arrays(name, a=a, b=b, c=c)
    operands, result = modes.parse(name, subscripts, ("a", "b", "c"), (a.shape, b.shape, c.shape))
    return _bind(
        name,
        {"a": a, "b": b, "c": c},
        operands,
        result,
        unary={"op_a": op_a, "op_b": op_b, "op_c": op_c},
        combine={"op_ab": op_ab, "op_abc": op_abc},
        scalars={"alpha": alpha, "beta": beta, "gamma": gamma},
        compute_type=compute_type,
        implementation=implementation,
    )


def _bind(
    op, arrays, operands, result, *, unary, combine, scalars, compute_type, implementation
) -> jax.Array:
    dtype = next(iter(arrays.values())).dtype
    for name, term in zip(arrays, operands, strict=True):
        if not set(term) <= set(result):
            raise ValueError(
                f"{op}: modes of the operands must be modes of the result, got one of {name} that "
                "the result lacks; sum over it first with jax_tcgemm.tensor.reduce"
            )
    unary = [
        operators.canonical(op, name, operator, dtype, operators.UNARY)
        for name, operator in unary.items()
    ]
    combine = [
        operators.canonical(op, name, operator, dtype, operators.BINARY)
        for name, operator in combine.items()
    ]
    check_compute_type(op, compute_type, dtype, ELEMENTWISE_COMPUTE)
    options = call_options(op, implementation, kind=op.removeprefix("tensor."))
    return primitive.elementwise(
        *arrays.values(),
        options=options,
        modes=operands,
        result=result,
        unary=unary,
        combine=combine,
        scalars=(arguments.scalar(op, name, value, dtype) for name, value in scalars.items()),
        compute=compute_type or "",
    )
