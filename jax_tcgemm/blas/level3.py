"""BLAS level 3: functions of matrices. Every array may have batch dimensions in front."""

from collections.abc import Iterable, Sequence

import jax

from jax_tcgemm.blas.arguments import (
    arrays,
    bind,
    check_choice,
    check_options,
    check_square,
    scalars,
    transposition,
)
from jax_tcgemm.problem.blas_call import DEFAULT_OPTIONS, Call, Options
from jax_tcgemm.products.arguments import as_array, check_flag


def gemm(
    a,
    b,
    c=None,
    *,
    alpha=1.0,
    beta=1.0,
    trans_a: str = "N",
    trans_b: str = "N",
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """The product of matrices, with all that BLAS offers around it.

        out = alpha op(A) op(B) + beta C

    `jax_tcgemm.matmul` is the function for products as such, and chooses among all implementations
    of them; this one is for the rest of the equation and for cuBLAS's options. Batch dimensions
    broadcast and become one strided-batched call.

    Args:
      a: matrix (..., m, k), or (..., k, m) where op transposes it.
      b: matrix (..., k, n), or (..., n, k) where op transposes it.
      c: matrix (..., m, n), updated in place where it is donated; None leaves the term out.
      alpha: a number, or a scalar array, which is then read on the device.
      beta: likewise; c is not read where it is the number 0.
      trans_a: "N": op(A) = A; "T": its transpose; "C": the conjugate of that. No array is copied.
      trans_b: the same of B.
      implementation: "cublas", "host" or "xla", which then runs the call or it fails; None selects.
      options: `blas.Options`: how cuBLAS computes. By default float32 is multiplied as float32.

    Returns:
      (..., m, n), dtypes promote. Half types are summed in float32 and rounded once.

    Raises:
      TypeError: for arrays, dtypes or scalars that do not go together.
      ValueError: for shapes that do not fit, or an implementation that cannot run here.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> a, b = jnp.array([[7.0, 1, 2], [4, 3, -2]]), jnp.array([[2.0, 5], [0, 1], [1, 0]])
      >>> blas.gemm(a, b, jnp.ones((2, 2)), beta=-1).tolist()
      [[15.0, 35.0], [5.0, 22.0]]
    """
    op = "blas.gemm"
    a, b, c = arrays(op, {"a": 2, "b": 2, "c": 2}, "c", a=a, b=b, c=c)
    call = Call(op, "gemm", options=options, implementation=implementation)
    call, operands = _gemm_call(call, a, b, c, alpha, beta, trans_a, trans_b)
    return bind(call, a, b, *(() if c is None else (c,)), *operands)[0]


def _gemm_call(call, a, b, c, alpha, beta, trans_a, trans_b):
    """The call with its scalars, checked against the shapes; and the scalars that are operands."""
    op = call.op
    check_options(op, call.implementation, call.options)
    op_a = transposition(op, "trans_a", trans_a, a.dtype)
    op_b = transposition(op, "trans_b", trans_b, b.dtype)
    m, k = a.shape[-2:] if trans_a == "N" else a.shape[:-3:-1]
    b_k, n = b.shape[-2:] if trans_b == "N" else b.shape[:-3:-1]
    if k != b_k:
        raise ValueError(
            f"{op}: the columns of op(a) must be as many as the rows of op(b), got a.shape="
            f"{a.shape}, {trans_a=} and b.shape={b.shape}, {trans_b=}; transpose one"
        )
    if c is not None and c.shape[-2:] != (m, n):
        raise ValueError(
            f"{op}: c must be a matrix of {m} x {n}, got c.shape={c.shape}; "
            "its batch dimensions broadcast, its own do not"
        )
    changes, operands = scalars(op, a.dtype, alpha=alpha, beta=beta if c is not None else 0.0)
    return call.replace(op_a=op_a, op_b=op_b, has_c=c is not None, **changes), operands


def gemm_batched(
    a: Sequence,
    b: Sequence,
    c: Sequence | None = None,
    *,
    alpha=1.0,
    beta=1.0,
    trans_a: str = "N",
    trans_b: str = "N",
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> list[jax.Array]:
    """Many products of separate arrays in one call: BLAS's batch over arrays of pointers.

        out[i] = alpha op(A[i]) op(B[i]) + beta C[i]

    For matrices of equal shapes that are not one array, such as the weights of a tree: none is
    copied to be stacked.

    Args:
      a: matrices of one shape, as of `gemm`.
      b: as many of one shape.
      c: as many of one shape, or None.
      alpha: as of `gemm`, one for all.
      beta: likewise.
      trans_a: as of `gemm`.
      trans_b: as of `gemm`.
      implementation: as of `gemm`.
      options: as of `gemm`.

    Returns:
      A list of as many matrices.

    Raises:
      TypeError: for arrays, dtypes or scalars that do not go together.
      ValueError: for lists of unlike lengths, arrays of unlike shapes, shapes that do not fit,
        or an implementation that cannot run here.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> x = [jnp.eye(2), 2 * jnp.eye(2)]
      >>> [out.tolist() for out in blas.gemm_batched(x, x)]
      [[[1.0, 0.0], [0.0, 1.0]], [[4.0, 0.0], [0.0, 4.0]]]
    """
    op = "blas.gemm_batched"
    given = {"a": a, "b": b} | ({} if c is None else {"c": c})
    groups = {name: _items(op, name, group) for name, group in given.items()}
    lengths = {name: len(group) for name, group in groups.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"{op}: a, b and c must be as many, got {lengths}; give all to each product"
        )
    items = lengths["a"]
    if items == 0:
        return []
    names = {f"{name}[{i}]": x for name, group in groups.items() for i, x in enumerate(group)}
    flat = arrays(op, dict.fromkeys(names, 2), **names)
    grouped = {name: flat[i * items : (i + 1) * items] for i, name in enumerate(groups)}
    for name, group in grouped.items():
        if len({x.shape for x in group}) > 1:
            raise ValueError(
                f"{op}: all of {name} must have one shape, got {[x.shape for x in group]}; "
                "group them by shape"
            )
    first = {name: group[0] for name, group in grouped.items()}
    call = Call(op, "gemm", items=items, options=options, implementation=implementation)
    call, operands = _gemm_call(
        call, first["a"], first["b"], first.get("c"), alpha, beta, trans_a, trans_b
    )
    return bind(call, *flat, *operands)


def _items(op: str, name: str, group) -> list:
    """A sequence of arrays as a list; of one array, its entries."""
    is_sequence = isinstance(group, Iterable)
    if hasattr(group, "dtype"):
        group = as_array(op, name, group)
        is_sequence = group.ndim > 0 and isinstance(group.shape[0], int)
    if not is_sequence:
        raise TypeError(
            f"{op}: {name} must be a sequence of arrays, got {name} of type "
            f"{type(group).__name__}; pass a list"
        )
    return list(group)


def trsm(
    a,
    b,
    *,
    alpha=1.0,
    side: str = "left",
    lower: bool = True,
    trans: str = "N",
    unit_diagonal: bool = False,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """The solution X of triangular systems with many right-hand sides.

        op(A) X = alpha B   (side="left")        X op(A) = alpha B   (side="right")

    Args:
      a: matrix (..., m, m), for the right side (..., n, n), of which one triangle is read.
      b: matrix (..., m, n), updated in place where it is donated.
      alpha: a number, or a scalar array, which is then read on the device.
      side: where A stands.
      lower: whether the lower triangle is read.
      trans: "N": op(A) = A; "T": its transpose; "C": the conjugate of that.
      unit_diagonal: whether the diagonal is taken to be ones, and not read.
      implementation: as of `gemm`; cuBLAS has float32, float64 and their complex types.
      options: as of `gemm`.

    Returns:
      X, of b's shape with the batch dimensions of both; a zero on the diagonal gives infinities and
      NaNs.

    Raises:
      TypeError: for arrays, dtypes or scalars that do not go together.
      ValueError: for a matrix that is not square, shapes that do not fit, or an implementation that
        cannot run here.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> blas.trsm(jnp.array([[2.0, 0], [1, 4]]), jnp.array([[2.0, 4], [9, 6]])).tolist()
      [[1.0, 2.0], [2.0, 1.0]]
    """
    op = "blas.trsm"
    check_options(op, implementation, options)
    a, b = arrays(op, {"a": 2, "b": 2}, a=a, b=b)
    check_square(op, a)
    check_choice(op, "side", side, ("left", "right"))
    rows = b.shape[-2 if side == "left" else -1]
    if a.shape[-1] != rows:
        raise ValueError(
            f"{op}: a must be a matrix of {rows} x {rows} for {side=}, got a.shape={a.shape} and "
            f"b.shape={b.shape}; pass the other side or transpose b"
        )
    changes, operands = scalars(op, a.dtype, alpha=alpha)
    call = Call(
        op,
        "trsm",
        op_a=transposition(op, "trans", trans, a.dtype),
        upper=not check_flag(op, "lower", lower),
        right=side == "right",
        unit=check_flag(op, "unit_diagonal", unit_diagonal),
        has_c=True,
        options=options,
        implementation=implementation,
        **changes,
    )
    return bind(call, a, b, *operands)[0]
