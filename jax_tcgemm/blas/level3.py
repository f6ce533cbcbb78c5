"""BLAS level 3: functions of matrices. Every array may have leading batch dimensions."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.blas.arguments import (
    arrays,
    bind,
    check_choice,
    check_options,
    check_square,
    scalars,
    transposition,
    with_one_batch,
)
from jax_tcgemm.problem.blas.call import DEFAULT_OPTIONS, Call, Options
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import as_array, call_options, check_flag
from jax_tcgemm.products.gram import scaled_gram


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
    """Product of matrices with BLAS's alpha, beta, C and transpositions.

        out = alpha op(A) op(B) + beta C

    For plain products, prefer `jax_tcgemm.matmul`, which selects among all implementations. `gemm`
    serves the rest of the equation and cuBLAS's options. Batch dimensions broadcast and become one
    strided-batched call.

    Args:
      a: matrix of shape (..., m, k), or (..., k, m) if op transposes A.
      b: matrix of shape (..., k, n), or (..., n, k) if op transposes B.
      c: None, or a matrix of shape (..., m, n), updated in place if donated. None omits beta C.
      alpha: a number, or a scalar array, which cuBLAS reads on the device.
      beta: a number, or a scalar array, which cuBLAS reads on the device. c is not read if beta is
        the number 0.
      trans_a: "N" for op(A) = A, "T" for the transpose, "C" for the conjugate transpose. No array
        is copied.
      trans_b: "N", "T" or "C" for op(B).
      implementation: "cublas", "host" or "xla", which must run the call; the call fails if the
        implementation cannot. None selects an implementation.
      options: `blas.Options` for cuBLAS. By default, float32 is multiplied in float32.

    Returns:
      Array of shape (..., m, n). Dtypes promote. 16-bit dtypes accumulate in float32 and are
      rounded once.

    Raises:
      TypeError: if arrays, dtypes or scalars do not combine.
      ValueError: if shapes do not match, or the implementation cannot run here.

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
    """Return the checked call with its static scalars, and the scalars that are operands."""
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
    """Products of many separate arrays in one call, as BLAS's pointer-array batched GEMM.

        out[i] = alpha op(A[i]) op(B[i]) + beta C[i]

    The matrices have equal shapes but are not one array, such as the leaves of a pytree. No matrix
    is copied for stacking.

    Args:
      a: matrices of one shape; see `gemm`.
      b: matrices of one shape; as many as a.
      c: matrices of one shape, as many as a, or None.
      alpha: a number or a scalar array for all products; see `gemm`.
      beta: a number or a scalar array for all products; see `gemm`.
      trans_a: "N", "T" or "C"; see `gemm`.
      trans_b: "N", "T" or "C"; see `gemm`.
      implementation: name of an implementation; see `gemm`.
      options: `blas.Options`; see `gemm`.

    Returns:
      A list of matrices, as many as a.

    Raises:
      TypeError: if arrays, dtypes or scalars do not combine.
      ValueError: if lists differ in length, arrays of a list differ in shape, shapes do not match,
        or the implementation cannot run here.

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
            f"{op}: a, b and c must have the same length, got {lengths}; repeat the shorter one"
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


def syrk(
    a,
    c=None,
    *,
    alpha=1.0,
    beta=1.0,
    trans: str = "N",
    lower: bool | None = None,
    precision="highest",
    implementation: str | None = None,
) -> jax.Array:
    """Symmetric product of a matrix by its own transpose, a rank-k update of C.

        out = alpha op(A) op(A)^T + beta C

    The result has both triangles, as other JAX arrays do. A GEMM of this library computes it: on a
    GPU of compute capability 9.0, the kernels compute half of the tiles and store each one twice
    (see `jax_tcgemm.gram`). Kernels compute half for 16-bit dtypes, and for float32 with a
    precision other than "highest". Other products are computed in full.

    Args:
      a: matrix of shape (..., n, k), or (..., k, n) if op transposes A.
      c: None, or a matrix of shape (..., n, n). None omits beta C.
      alpha: a number, or a scalar array.
      beta: a number, or a scalar array. c is not read if beta is the number 0.
      trans: "N" for op(A) = A, "T" for the transpose. For real matrices, "C" is the same as "T".
      lower: the triangle of c that is read: True for the lower triangle, False for the upper
        triangle. The other triangle of c is ignored, and c is copied. None reads all of c, which
        must be symmetric; symmetry is not checked, and elements of the result above the diagonal
        are unspecified for other matrices.
      precision: precision of the product; see `jax_tcgemm.matmul`. By default, float32 is
        multiplied in float32, as by `gemm`. None uses `jax.default_matmul_precision`, which on a
        GPU selects TF32 by default.
      implementation: name of an implementation of `jax_tcgemm.matmul`, such as "wgmma" or "xla",
        which must run the product. None selects an implementation.

    Returns:
      Symmetric array of shape (..., n, n). Dtypes promote, and batch dimensions broadcast. 16-bit
      dtypes accumulate in float32 and are rounded once. Complex matrices are not conjugated. A
      result that is computed in full may differ from its transpose by rounding.

    Raises:
      TypeError: if arrays, dtypes or scalars do not combine.
      ValueError: if shapes do not match, or the implementation cannot run here.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> a = jnp.array([[1.0, 2], [3, 4]])
      >>> blas.syrk(a, jnp.eye(2), alpha=2).tolist()
      [[11.0, 22.0], [22.0, 51.0]]
    """
    op = "blas.syrk"
    a, c = arrays(op, {"a": 2, "c": 2}, "c", a=a, c=c)
    return _symmetric_update(op, [a], c, alpha, beta, trans, lower, precision, implementation)


def syr2k(
    a,
    b,
    c=None,
    *,
    alpha=1.0,
    beta=1.0,
    trans: str = "N",
    lower: bool | None = None,
    precision="highest",
    implementation: str | None = None,
) -> jax.Array:
    """Symmetric product of two matrices, a rank-2k update of C.

        out = alpha (op(A) op(B)^T + op(B) op(A)^T) + beta C

    The result has both triangles, as other JAX arrays do. On a GPU, if k <= n and the kernels
    compute half of a symmetric product of this dtype and precision (see `syrk`), the result is one
    symmetric product, [op(A) op(B)] [op(B) op(A)]^T. Other results are op(A) op(B)^T plus its
    transpose.

    Args:
      a: matrix of shape (..., n, k), or (..., k, n) if op transposes A and B.
      b: matrix of the shape of a, except for batch dimensions, which broadcast.
      c: None, or a matrix of shape (..., n, n). None omits beta C.
      alpha: a number, or a scalar array.
      beta: a number, or a scalar array. c is not read if beta is the number 0.
      trans: "N", "T" or "C" for both matrices; see `syrk`.
      lower: the triangle of c that is read, or None for all of a symmetric c; see `syrk`.
      precision: precision of the product; see `syrk`.
      implementation: name of an implementation of `jax_tcgemm.matmul`; see `syrk`.

    Returns:
      Symmetric array of shape (..., n, n); see `syrk`. The symmetric product of two matrices adds
      the elements (i, j) and (j, i) of tiles on the diagonal in different orders, so they may
      differ by rounding.

    Raises:
      TypeError: if arrays, dtypes or scalars do not combine.
      ValueError: if shapes do not match, or the implementation cannot run here.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> a, b = jnp.array([[1.0, 2], [3, 4]]), jnp.array([[1.0, 0], [0, 1]])
      >>> blas.syr2k(a, b).tolist()
      [[2.0, 5.0], [5.0, 8.0]]
    """
    op = "blas.syr2k"
    a, b, c = arrays(op, {"a": 2, "b": 2, "c": 2}, "c", a=a, b=b, c=c)
    if a.shape[-2:] != b.shape[-2:]:
        raise ValueError(
            f"{op}: a and b must be matrices of one shape, got a.shape={a.shape} and "
            f"b.shape={b.shape}; transpose one, since trans is of both"
        )
    return _symmetric_update(op, [a, b], c, alpha, beta, trans, lower, precision, implementation)


def _symmetric_update(
    op: str, matrices: list, c, alpha, beta, trans, lower, precision, implementation
) -> jax.Array:
    """Return the result of `syrk` for one matrix, of `syr2k` for two; dtypes are checked."""
    options = call_options(op, implementation)
    dtype, shape = matrices[0].dtype, matrices[0].shape
    is_complex = np.dtype(dtype).kind == "c"
    check_choice(op, "trans", trans, ("N", "T") if is_complex else ("N", "T", "C"))
    n = shape[-2 if trans == "N" else -1]
    if c is not None and c.shape[-2:] != (n, n):
        raise ValueError(
            f"{op}: c must be a matrix of {n} x {n}, got c.shape={c.shape}; "
            "its batch dimensions broadcast, its own do not"
        )
    lower = None if lower is None else check_flag(op, "lower", lower)
    precision = canonical_precision(op, precision)
    alpha, beta = (_scalar(op, name, x, dtype) for name, x in (("alpha", alpha), ("beta", beta)))
    if c is None or (isinstance(beta, float) and beta == 0):
        c, beta = None, 0.0
    if c is not None and lower is not None:
        rows, columns = (lax.broadcasted_iota(np.int32, c.shape, c.ndim - i) for i in (2, 1))
        is_read = rows >= columns if lower else rows <= columns
        c = jnp.where(is_read, c, jnp.swapaxes(c, -1, -2))
    *matrices, c = with_one_batch(op, *matrices, c)
    return scaled_gram(
        options,
        matrices,
        c,
        alpha=alpha,
        beta=beta,
        dtype=dtype,
        axis=-1 if trans == "N" else -2,
        precision=precision,
    )


def _scalar(op: str, name: str, value, dtype):
    """Return alpha or beta as a float, or as an array if it is an array or complex."""
    numbers, operands = scalars(op, dtype, **{"alpha": 1.0} | {name: value})
    if operands:
        return operands[name == "beta"]
    number = numbers[name]
    return number.real if number.imag == 0 else jnp.asarray(number, dtype)


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
    """Solution X of triangular systems with many right-hand sides.

        op(A) X = alpha B   (side="left")        X op(A) = alpha B   (side="right")

    Args:
      a: matrix of shape (..., m, m), or (..., n, n) for side="right", of which one triangle is
        read.
      b: matrix of shape (..., m, n), updated in place if donated.
      alpha: a number, or a scalar array, which cuBLAS reads on the device.
      side: the side of A in the equation, "left" or "right".
      lower: whether the lower triangle is read, or else the upper triangle.
      trans: "N" for op(A) = A, "T" for the transpose, "C" for the conjugate transpose.
      unit_diagonal: whether the diagonal is assumed to be ones and not read.
      implementation: name of an implementation; see `gemm`. cuBLAS supports float32, float64 and
        their complex dtypes.
      options: `blas.Options`; see `gemm`.

    Returns:
      X, of the shape of b with the batch dimensions of both operands. A zero on the diagonal gives
      infinities and NaNs.

    Raises:
      TypeError: if arrays, dtypes or scalars do not combine.
      ValueError: if the matrix is not square, shapes do not match, or the implementation cannot run
        here.

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
