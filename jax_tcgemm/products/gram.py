"""Public `gram`: symmetric products that compute half of the tiles."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives.encodings.plain import Plain
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.precision import canonical_precision, resolve
from jax_tcgemm.products.arguments import (
    ShapeError,
    as_array,
    call_options,
    canonical_element_type,
    canonical_sharding,
    check_flag,
)
from jax_tcgemm.products.epilogue import with_encoded_epilogue
from jax_tcgemm.sharding import partitioning


def gram(
    x,
    *,
    transpose: bool = False,
    alpha=1.0,
    beta=0.0,
    c=None,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    implementation: str | None = None,
    config: str | None = None,
):
    """Gram matrix of the rows or columns of x, scaled, plus a scaled symmetric matrix.

        out[..., i, j] = alpha * sum over k of x[..., i, k] * x[..., j, k] + beta * c[..., i, j]

    With `transpose`, the sum is over x[..., k, i] * x[..., k, j].

    On a GPU of compute capability 9.0, the kernel computes only the tiles on and below the
    diagonal, and stores the tiles below the diagonal a second time, transposed. This saves nearly
    half the work of `matmul(x, x.T)`. A jitted program's `matmul(x, x.T)` is recognized and
    computed in the same way. On other devices, `gram` is a plain product.

    Args:
      x: array of shape (..., n, k), or (..., k, n) with `transpose`, of any numeric dtype.
      transpose: whether to multiply the columns of x, x.T @ x.
      alpha: a number or a 0-D array.
      beta: a number or a 0-D array.
      c: None, or an array of shape (..., n, n) of symmetric matrices. Symmetry is not checked; for
        other matrices, elements of the result above the diagonal are unspecified. c is not read if
        beta is the number 0.
      precision: precision of the product; see `matmul`.
      preferred_element_type: dtype of the result. None selects the dtype of x.
      out_sharding: sharding of the result, for meshes with explicit axes.
      implementation: name of an implementation; see `matmul`.
      config: name of a config of that implementation; see `matmul`.

    Returns:
      An array of shape (..., n, n). Where half is computed in float16, bfloat16 or float32 (as
      TF32), each matrix is bit-equal to its transpose.

    Raises:
      TypeError: if operands are not numeric arrays.
      ValueError: if x has fewer than two dimensions, c has another shape, c is missing and beta is
        not 0, alpha or beta is not a scalar, or under the conditions of `matmul`.

    Numerics:
      The rules of `matmul` apply. Accumulators are scaled and c is added in float32 (float64 for
      float64), and the result is rounded once. The derivative with respect to x is one product,
      with the sum of the cotangent and its transpose.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> x = jnp.arange(6.0).reshape(2, 3)
      >>> jax_tcgemm.gram(x)
      Array([[ 5., 14.],
             [14., 50.]], dtype=float32)
      >>> jax_tcgemm.gram(x, transpose=True, alpha=2, beta=1, c=jnp.eye(3)).shape
      (3, 3)
    """
    op = "gram"
    x, transpose = as_array(op, "x", x), check_flag(op, "transpose", transpose)
    if x.ndim < 2:
        raise ShapeError(
            f"{op}: x must have two dimensions or more, got x.shape={x.shape}; reshape it"
        )
    n = x.shape[-1 if transpose else -2]
    alpha, beta = (_scalar(op, name, v) for name, v in (("alpha", alpha), ("beta", beta)))
    if c is None and not (isinstance(beta, float) and beta == 0):
        raise ValueError(f"{op}: beta must be 0 without c, got beta={beta}; give c")
    if c is not None:
        c = as_array(op, "c", c)
        if c.shape != (*x.shape[:-2], n, n):
            raise ShapeError(
                f"{op}: c must have the shape of the result, {(*x.shape[:-2], n, n)}, got "
                f"c.shape={c.shape}; broadcast it"
            )
    if isinstance(beta, float) and beta == 0:
        c = None
    return scaled_gram(
        call_options(op, implementation, config),
        (x,),
        c,
        alpha=alpha,
        beta=beta,
        dtype=canonical_element_type(op, preferred_element_type) or x.dtype,
        axis=-2 if transpose else -1,
        precision=canonical_precision(op, precision),
        out_sharding=canonical_sharding(op, out_sharding, x.ndim),
    )


def scaled_gram(
    options: CallOptions,
    arrays: Sequence,
    c=None,
    *,
    alpha=1.0,
    beta=0.0,
    dtype,
    axis=-1,
    precision=None,
    out_sharding=None,
) -> jax.Array:
    """Return alpha * x @ x.T + beta * c, or alpha * (x @ y.T + y @ x.T) + beta * c.

    `arrays` are x, or x and y of one shape and dtype. `alpha` and `beta` are floats, which are
    constants of the kernel, or 0-D arrays, which it reads. `axis` is the one that is contracted. c
    is symmetric. The derivative is one product for each array.

    On CUDA, the sum of two products is one symmetric product of [x y] and [y x] where kernels
    compute half of it and the contracted axis is no longer than the rows. Otherwise it is x @ y.T
    plus its transpose. Both take as many multiplications: the former copies the arrays, the latter
    writes and reads the product once more.
    """
    terms, scalars = ScaledSum.of(dtype, alpha, beta)
    x, *_ = arrays
    n, k = x.shape[-3 - axis], x.shape[axis]
    is_long = not (isinstance(n, int) and isinstance(k, int) and k <= n)
    adds_transpose = len(arrays) == 2 and (is_long or not _computes_half(x.dtype, precision))
    spec = _Spec(options, terms, axis, precision, out_sharding, adds_transpose)
    return _gram(spec, tuple(arrays), c, scalars)


def _computes_half(dtype, precision) -> bool:
    """Whether kernels that compute half of a symmetric result multiply this dtype."""
    numerics = resolve(dtype, dtype, dtype, precision, "cuda")
    if isinstance(numerics, str) or np.dtype(dtype).kind == "c":
        return False
    return numerics.lhs_dtype.itemsize < 4 or numerics.compute == "tf32"


def with_symmetric_epilogue(
    options: CallOptions,
    lhs,
    rhs,
    epilogue: Callable,
    operands: Sequence,
    *,
    axis: int = -1,
    precision=None,
    out_sharding=None,
):
    """Return an epilogue of lhs @ rhs.T; the product and the result are known to be symmetric.

    `axis` is the one that both contract: -2 computes lhs.T @ rhs. The operands of the epilogue
    are as for `with_encoded_epilogue`.
    """
    encoding = Plain.of(
        lhs,
        rhs,
        _numbers(lhs.ndim, axis),
        precision=precision,
        out_sharding=out_sharding,
        symmetric=True,
    )
    return with_encoded_epilogue(options, encoding, (lhs, rhs), epilogue, operands)


def _numbers(ndim: int, axis: int):
    """Dimension numbers of a product that contracts the same axis of both operands."""
    batch = tuple(range(ndim - 2))
    return ((ndim + axis,), (ndim + axis,)), (batch, batch)


def symmetric_product(
    options: CallOptions, lhs, rhs, c=None, *, alpha=1.0, beta=0.0, dtype, axis=-1, precision=None
) -> jax.Array:
    """Return alpha * lhs @ rhs.T + beta * c of matrices whose product is known to be symmetric.

    Such are polynomials of one symmetric matrix, which commute. `alpha` and `beta` are floats,
    which are constants of the kernel, or 0-D arrays, which it reads. `axis` as for
    `with_symmetric_epilogue`.
    """
    terms, scalars = ScaledSum.of(dtype, alpha, beta)
    operands = (*([] if c is None else [c]), *scalars)
    return with_symmetric_epilogue(
        options, lhs, rhs, terms, operands, axis=axis, precision=precision
    )


def _scalar(op: str, name: str, value):
    """A number as a float; a 0-D array as it is."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    value = as_array(op, name, value)
    if value.ndim != 0:
        raise ValueError(
            f"{op}: {name} must be a number or a 0-D array, got {name}.shape={value.shape}; scale "
            "the result instead"
        )
    return value


@dataclasses.dataclass(frozen=True)
class ScaledSum:
    """The epilogue alpha * acc + beta * c, rounded to a dtype.

    Attributes:
      dtype: dtype of the result.
      alpha: a number, or None if alpha is an operand.
      beta: a number, or None if beta is an operand; it follows alpha.
    """

    dtype: np.dtype
    alpha: float | None
    beta: float | None

    @classmethod
    def of(cls, dtype, alpha, beta) -> tuple["ScaledSum", list]:
        """Return the epilogue for floats or 0-D arrays, and the arrays, which are its operands."""
        scalars = [v for v in (alpha, beta) if not isinstance(v, float)]
        known = (v if isinstance(v, float) else None for v in (alpha, beta))
        return cls(np.dtype(dtype), *known), scalars

    def __call__(self, acc, *operands):
        """Apply the epilogue to an accumulator, c if there is one, and scalars that are arrays."""
        wide = wide_dtype(acc.dtype if jnp.issubdtype(acc.dtype, np.inexact) else self.dtype)
        given = list(operands)
        c = given.pop(0) if given and given[0].ndim == acc.ndim else None
        alpha, beta = (given.pop(0) if v is None else v for v in (self.alpha, self.beta))
        is_scaled = not (isinstance(alpha, float) and alpha == 1)
        if not is_scaled and c is None:
            return acc.astype(self.dtype)
        found = acc.astype(wide)
        if is_scaled:
            found = jnp.asarray(alpha, wide) * found
        if c is not None:
            found = found + jnp.asarray(beta, wide) * c.astype(wide)
        return found.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Static parameters of a call.

    Attributes:
      options: options of the product.
      terms: the epilogue.
      axis: the contracted axis of each array.
      precision: canonical.
      out_sharding: canonical.
      adds_transpose: whether the product of two arrays is computed, and its transpose added.
    """

    options: CallOptions
    terms: ScaledSum
    axis: int
    precision: object
    out_sharding: object
    adds_transpose: bool

    def product(self, x, y, dtype, options: CallOptions) -> jax.Array:
        """Return x @ y.T."""
        return plain.dot_general(
            x,
            y,
            options=options,
            dimension_numbers=_numbers(x.ndim, self.axis),
            precision=self.precision,
            preferred_element_type=dtype,
            out_sharding=self.out_sharding,
        )


def _with_transpose(x) -> jax.Array:
    return x + partitioning.resharded(jnp.swapaxes(x, -1, -2), jax.typeof(x).sharding)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gram(spec: _Spec, arrays, c, scalars) -> jax.Array:
    operands = (*([] if c is None else [c]), *scalars)
    if len(arrays) == 1:
        return _symmetric(spec, *arrays, *arrays, operands)
    if spec.adds_transpose:
        return _product_and_transpose(spec, arrays, operands)
    # Only on CUDA do kernels compute half of the concatenated product, which has twice the work.
    return lax.platform_dependent(
        arrays,
        operands,
        cuda=functools.partial(_concatenated, spec),
        default=functools.partial(_product_and_transpose, spec),
    )


def _symmetric(spec: _Spec, lhs, rhs, operands) -> jax.Array:
    return with_symmetric_epilogue(
        spec.options,
        lhs,
        rhs,
        spec.terms,
        operands,
        axis=spec.axis,
        precision=spec.precision,
        out_sharding=spec.out_sharding,
    )


def _concatenated(spec: _Spec, arrays, operands) -> jax.Array:
    lhs, rhs = (jnp.concatenate(xs, spec.axis) for xs in (arrays, arrays[::-1]))
    return _symmetric(spec, lhs, rhs, operands)


def _product_and_transpose(spec: _Spec, arrays, operands) -> jax.Array:
    half = spec.product(*arrays, wide_dtype(spec.terms.dtype), spec.options)
    return spec.terms(_with_transpose(half), *operands)


def _gram_jvp(spec: _Spec, primals, tangents):
    (arrays, c, scalars), (darrays, dc, dscalars) = primals, tangents
    terms, wide = spec.terms, wide_dtype(spec.terms.dtype)
    given, moving = iter(scalars), iter(dscalars)
    alpha, beta = (next(given) if v is None else v for v in (terms.alpha, terms.beta))
    alpha, beta = (jnp.asarray(v, wide) for v in (alpha, beta))
    dalpha, dbeta = (next(moving) if v is None else None for v in (terms.alpha, terms.beta))
    addends = []
    options = spec.options.without_config()
    # d(x @ y.T + y @ x.T) is the sum of dx @ y.T + dy @ x.T and its transpose, as d(x @ x.T) is.
    halves = [
        spec.product(dx, y, terms.dtype, options).astype(wide)
        for dx, y in zip(darrays, arrays[::-1], strict=True)
        if _moves(dx)
    ]
    if halves:
        addends.append(alpha * _with_transpose(functools.reduce(jnp.add, halves)))
    if _moves(dalpha):
        one = dataclasses.replace(spec, terms=ScaledSum(wide, 1.0, 0.0))
        addends.append(dalpha.astype(wide) * _gram(one, arrays, None, []))
    if c is not None and _moves(dc):
        addends.append(beta * dc.astype(wide))
    if c is not None and _moves(dbeta):
        addends.append(dbeta.astype(wide) * c.astype(wide))
    out = _gram(spec, arrays, c, scalars)
    if not addends:
        return out, jnp.zeros_like(out)
    return out, functools.reduce(jnp.add, addends).astype(out.dtype)


def _moves(tangent) -> bool:
    return tangent is not None and not isinstance(tangent, SymbolicZero)


_gram.defjvp(_gram_jvp, symbolic_zeros=True)
