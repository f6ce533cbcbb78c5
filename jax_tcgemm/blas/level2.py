"""BLAS level 2: functions of a matrix and vectors.

Every array may have leading batch dimensions, which broadcast. With an increment, only every
increment-th element of a vector takes part, starting with the first; the other elements keep their
values.
"""

import jax
import jax.numpy as jnp

from jax_tcgemm.blas.arguments import (
    arrays,
    bind,
    check_increment,
    check_integer,
    check_options,
    check_shape,
    check_span,
    check_square,
    scalars,
    transposition,
)
from jax_tcgemm.problem.blas.call import DEFAULT_OPTIONS, Call, Options, band_index
from jax_tcgemm.problem.dtypes import MAX_EXTENT
from jax_tcgemm.products.arguments import check_flag


def gemv(
    a,
    x,
    y=None,
    *,
    alpha=1.0,
    beta=1.0,
    trans: str = "N",
    increment_x: int = 1,
    increment_y: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Product of a matrix and a vector.

        out = alpha op(A) x + beta y

    Args:
      a: matrix of shape (..., m, n), read in place for every op.
      x: vector of shape (..., n), or (..., m) if op transposes; longer with an increment.
      y: None, or a vector of shape (..., m), or (..., n) if op transposes; longer with an
        increment. None omits beta y. y is updated in place if donated.
      alpha: a number, or a scalar array, which cuBLAS reads on the device.
      beta: a number, or a scalar array, which cuBLAS reads on the device. y is not read if beta is
        the number 0.
      trans: "N" for op(A) = A, "T" for the transpose, "C" for the conjugate transpose.
      increment_x: distance between elements of x.
      increment_y: distance between elements of y. Elements in between keep their values.
      implementation: "cublas", "host" or "xla", which must run the call; the call fails if the
        implementation cannot. None selects an implementation.
      options: `blas.Options` for cuBLAS.

    Returns:
      The new y, of the shape of y, or (..., m) without y. Dtypes promote. 16-bit dtypes accumulate
      in float32 and are rounded once.

    Raises:
      TypeError: if arrays, dtypes or scalars do not combine.
      ValueError: if shapes or increments do not match, or the implementation cannot run here.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> a = jnp.array([[1.0, 3, 0, 0], [2, 1, 3, 0], [0, 2, 1, 3], [0, 0, 2, 1]])
      >>> blas.gemv(a, jnp.arange(1.0, 5), jnp.arange(5.0, 9)).tolist()
      [12.0, 19.0, 26.0, 18.0]
    """
    op = "blas.gemv"
    a, x, y = arrays(op, {"a": 2, "x": 1, "y": 1}, "y", a=a, x=x, y=y)
    shape = a.shape[-2:]
    trans = transposition(op, "trans", trans, a.dtype)
    call = Call(op, "gemv", options=options, implementation=implementation)
    return _product(call, shape, a, x, y, alpha, beta, trans, increment_x, increment_y)


def _product(call, shape, a, x, y, alpha, beta, trans, increment_x, increment_y):
    """Alpha op(A) x + beta y of a matrix of a shape."""
    op = call.op
    check_options(op, call.implementation, call.options)
    increments = (
        check_increment(op, "increment_x", increment_x),
        check_increment(op, "increment_y", increment_y),
    )
    rows, columns = shape if trans == "N" else shape[::-1]
    check_span(op, "x", x, columns, increments[0])
    if y is not None:
        check_span(op, "y", y, rows, increments[1])
    elif increments[1] != 1:
        raise ValueError(
            f"{op}: increment_y must be 1 without y, got increment_y={increment_y}; pass y"
        )
    changes, operands = scalars(op, a.dtype, alpha=alpha, beta=beta if y is not None else 0.0)
    call = call.replace(n=rows, op_a=trans, increments=increments, has_c=y is not None, **changes)
    return bind(call, a, x, *(() if y is None else (y,)), *operands)[0]


def gbmv(
    a,
    x,
    y=None,
    *,
    kl: int,
    ku: int,
    columns: int | None = None,
    alpha=1.0,
    beta=1.0,
    trans: str = "N",
    increment_x: int = 1,
    increment_y: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Product of a band matrix and a vector.

        out = alpha op(A) x + beta y

    A has kl diagonals below its main diagonal and ku diagonals above. The band is stored by rows,
    as CBLAS does for row-major arrays: a[..., i, kl + j - i] holds A[i, j]. Elements of the band
    outside the matrix are never used. `to_band` converts a full matrix to a band.

    Args:
      a: band of shape (..., m, kl + ku + 1).
      x: vector; see `gemv`.
      y: None, or a vector; see `gemv`.
      kl: number of diagonals below the main diagonal.
      ku: number of diagonals above the main diagonal.
      columns: n, the number of columns of A. None means m.
      alpha: a number or a scalar array; see `gemv`.
      beta: a number or a scalar array; see `gemv`.
      trans: "N", "T" or "C"; see `gemv`.
      increment_x: distance between elements of x; see `gemv`.
      increment_y: distance between elements of y; see `gemv`.
      implementation: name of an implementation; see `gemv`. cuBLAS supports float32, float64 and
        their complex dtypes.
      options: `blas.Options`; see `gemv`.

    Returns:
      The new y; see `gemv`.

    Raises:
      TypeError: if arrays, dtypes or scalars do not combine.
      ValueError: if the width of the band is not kl + ku + 1, other shapes or increments do not
        match, or the implementation cannot run here.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> a = jnp.array([[1.0, 3, 0, 0], [2, 1, 3, 0], [0, 2, 1, 3], [0, 0, 2, 1]])
      >>> blas.gbmv(blas.to_band(a, 1, 1), jnp.arange(1.0, 5), kl=1, ku=1).tolist()
      [7.0, 13.0, 19.0, 10.0]
    """
    op = "blas.gbmv"
    a, x, y = arrays(op, {"a": 2, "x": 1, "y": 1}, "y", a=a, x=x, y=y)
    kl, ku = _checked_band(op, kl, ku, a=a)
    if columns is None:
        columns = a.shape[-2]
    columns = check_integer(op, "columns", columns, 0, "None means as many as rows")
    trans = transposition(op, "trans", trans, a.dtype)
    call = Call(
        op,
        "gbmv",
        kl=kl,
        ku=ku,
        columns=columns,
        options=options,
        implementation=implementation,
    )
    given = (increment_x, increment_y)
    shape = (a.shape[-2], columns)
    if trans != "C":
        return _product(call, shape, a, x, y, alpha, beta, trans, *given)
    # No library conjugates a row-major band: A^H x is the conjugate of A^T conj(x).
    x, y, alpha, beta = (
        v.conjugate() if hasattr(v, "conjugate") else v for v in (x, y, alpha, beta)
    )
    return _product(call, shape, a, x, y, alpha, beta, "T", *given).conj()


def _checked_band(op: str, kl, ku, **band) -> tuple[int, int]:
    """The numbers of diagonals as integers, checked against the band's width where there is one."""
    kl, ku = (
        check_integer(op, name, width, 0, "it counts diagonals")
        for name, width in (("kl", kl), ("ku", ku))
    )
    if kl + ku + 1 > MAX_EXTENT:
        raise ValueError(
            f"{op}: kl + ku + 1 must be at most 2**31 - 1, got {kl=} and {ku=}; "
            "a matrix has no more diagonals than rows and columns"
        )
    for name, x in band.items():
        if x.shape[-1] != kl + ku + 1:
            raise ValueError(
                f"{op}: the last dimension of {name} must be kl + ku + 1 = {kl + ku + 1}, got "
                f"{name}.shape={x.shape}; blas.to_band makes a band of a full matrix"
            )
    return kl, ku


def to_band(a, kl: int, ku: int) -> jax.Array:
    """Convert a full matrix (..., m, n) to a band (..., m, kl + ku + 1) for `gbmv`.

    Elements of the band outside the matrix are 0. Elements of the matrix outside the band are
    dropped.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> blas.to_band(jnp.arange(1.0, 10).reshape(3, 3), 1, 0).tolist()
      [[0.0, 1.0], [4.0, 5.0], [8.0, 9.0]]
    """
    op = "blas.to_band"
    kl, ku = _checked_band(op, kl, ku)
    (a,) = arrays(op, {"a": 2}, a=a)
    *batch, m, n = check_shape(op, "a", a)
    column, exists = band_index(m, n, kl, ku)
    if n == 0:  # Of which nothing can be taken.
        return jnp.zeros((*batch, m, kl + ku + 1), a.dtype)
    rows = jnp.arange(m)[:, None]
    return jnp.where(exists, a[..., rows, column], 0)


def from_band(band, columns: int, kl: int, ku: int) -> jax.Array:
    """Convert a band (..., m, kl + ku + 1) back to a full matrix (..., m, columns).

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> blas.from_band(jnp.array([[0.0, 1], [4, 5]]), 2, 1, 0).tolist()
      [[1.0, 0.0], [4.0, 5.0]]
    """
    op = "blas.from_band"
    (band,) = arrays(op, {"band": 2}, band=band)
    kl, ku = _checked_band(op, kl, ku, band=band)
    columns = check_integer(op, "columns", columns, 0, "it counts those of the matrix")
    m = check_shape(op, "band", band)[-2]
    column, exists = band_index(m, columns, kl, ku)
    rows = jnp.arange(m)[:, None]
    full = jnp.zeros((*band.shape[:-1], columns), band.dtype)
    return full.at[..., rows, column].add(jnp.where(exists, band, 0))


def trsv(
    a,
    b,
    *,
    lower: bool = True,
    trans: str = "N",
    unit_diagonal: bool = False,
    increment: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Solution x of a triangular system.

        op(A) x = b

    Args:
      a: matrix of shape (..., n, n), of which one triangle is read.
      b: vector of shape (..., n), longer with an increment; updated in place if donated.
      lower: whether the lower triangle is read, or else the upper triangle.
      trans: "N" for op(A) = A, "T" for the transpose, "C" for the conjugate transpose.
      unit_diagonal: whether the diagonal is assumed to be ones and not read.
      increment: distance between elements of b. Elements in between keep their values.
      implementation: name of an implementation; see `gemv`. cuBLAS supports float32, float64 and
        their complex dtypes.
      options: `blas.Options`; see `gemv`.

    Returns:
      x, of the shape of b. A zero on the diagonal gives infinities and NaNs.

    Raises:
      TypeError: if BLAS does not support the arrays or dtypes.
      ValueError: if the matrix is not square, other shapes or increments do not match, or the
        implementation cannot run here.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> blas.trsv(jnp.array([[2.0, 0], [1, 4]]), jnp.array([2.0, 9])).tolist()
      [1.0, 2.0]
    """
    op = "blas.trsv"
    check_options(op, implementation, options)
    a, b = arrays(op, {"a": 2, "b": 1}, a=a, b=b)
    check_square(op, a)
    increment = check_increment(op, "increment", increment)
    check_span(op, "b", b, a.shape[-1], increment)
    call = Call(
        op,
        "trsv",
        n=a.shape[-1],
        increments=(increment, 1),
        op_a=transposition(op, "trans", trans, a.dtype),
        upper=not check_flag(op, "lower", lower),
        unit=check_flag(op, "unit_diagonal", unit_diagonal),
        has_c=True,
        options=options,
        implementation=implementation,
    )
    return bind(call, a, b)[0]
