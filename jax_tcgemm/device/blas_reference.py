"""Each BLAS routine in jax.numpy: for typing, as the fallback without a library, and as a peer.

Operands have leading batch dimensions, each of size 1 or the batch's, as `Call` says.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.problem.blas.call import Call, band_index, batch_shape, scale_dtype, span


def run(call: Call, *operands) -> list:
    """Compute the results of a call in full precision; 16-bit floats are computed in float32."""
    inputs, c, scalars = call.split(operands)
    if call.routine == "swap":
        return _swap(call, *c)
    results = []
    for item in range(call.items):
        arrays = [group[item] for group in inputs]
        last = () if c is None else (c[item],)
        results.append(_ROUTINES[call.routine](call, _scalars(call, scalars), *arrays, *last))
    if call.items == 1:
        return results
    # All results have the whole batch, also where only the operands of another item have it.
    batch = batch_shape(call, [x.shape for x in operands])
    return [jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :])) for x in results]


def _scalars(call, scalars):
    """Both scalars, as they broadcast against what they multiply."""
    if scalars is None:
        return call.alpha, call.beta
    return tuple(jnp.expand_dims(x, tuple(range(x.ndim, x.ndim + call.ranks.c))) for x in scalars)


def wide(x):
    """Convert 16-bit floats to float32."""
    return lax.convert_element_type(x, scale_dtype(x.dtype))


def static(scalar: complex, dtype) -> np.ndarray:
    """A number of a `Call` in a dtype; equal calls may spell it as a complex one or not."""
    return np.asarray(scalar if np.dtype(dtype).kind == "c" else np.real(scalar), dtype)


def _times(scalar, x):
    """The product in x's dtype; a static 1 costs nothing."""
    if isinstance(scalar, jax.Array):
        return scalar * x
    return x if scalar == 1 else static(scalar, x.dtype) * x


def _update(scalars, product, c):
    """The sum alpha * product + beta * c; what c holds does not matter where beta is 0."""
    alpha, beta = scalars
    out = _times(alpha, product)
    if c is None:
        return out
    if isinstance(beta, jax.Array):
        return out + jnp.where(beta == 0, 0, beta * wide(c))
    return out if beta == 0 else out + _times(beta, wide(c))


def elements(x, n: int, increment: int):
    """Every increment-th element of a vector, n of them."""
    return lax.slice_in_dim(x, 0, span(n, increment), increment, axis=-1)


def set_strided(c, values, increment: int):
    """Return `c` with every increment-th element replaced by `values`, rounded to its dtype."""
    values = values.astype(c.dtype)
    if increment == 1 and values.shape[-1] == c.shape[-1]:
        return values
    batch = jnp.broadcast_shapes(c.shape[:-1], values.shape[:-1])
    c = jnp.broadcast_to(c, (*batch, c.shape[-1]))
    return c.at[..., : span(values.shape[-1], increment) : increment].set(values)


def absolute(x):
    """|re| + |im|, BLAS's cheap absolute value."""
    if jnp.iscomplexobj(x):
        return jnp.abs(x.real) + jnp.abs(x.imag)
    return jnp.abs(x)


# --- level 1 ------------------------------------------------------------------------------------


def _iamax(call, scalars, x):
    size = absolute(elements(x, call.n, call.increments[0]))
    return lax.argmax(size, size.ndim - 1, np.int32)


def _iamin(call, scalars, x):
    size = absolute(elements(x, call.n, call.increments[0]))
    return lax.argmin(size, size.ndim - 1, np.int32)


def _real_dtype(x):
    """Return the real dtype of the precision of x."""
    return x.real.dtype if jnp.iscomplexobj(x) else x.dtype


def _asum(call, scalars, x):
    return absolute(wide(elements(x, call.n, call.increments[0]))).sum(-1).astype(_real_dtype(x))


def _nrm2(call, scalars, x):
    values = wide(elements(x, call.n, call.increments[0]))
    largest = absolute(values).max(-1, initial=0)
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    squares = jnp.square(jnp.abs(values / scale[..., None]))
    return (jnp.sqrt(squares.sum(-1)) * scale).astype(_real_dtype(x))


def _dot(call, scalars, x, y):
    left = wide(elements(x, call.n, call.increments[0]))
    left = left.conj() if call.op_a == "C" else left
    return (left * wide(elements(y, call.n, call.increments[1]))).sum(-1).astype(x.dtype)


def _scal(call, scalars, x):
    (increment, _) = call.increments
    return set_strided(x, _times(scalars[0], wide(elements(x, call.n, increment))), increment)


def _axpy(call, scalars, x, y):
    x = wide(elements(x, call.n, call.increments[0]))
    values = _times(scalars[0], x) + wide(elements(y, call.n, call.increments[1]))
    return set_strided(y, values, call.increments[1])


def _swap(call, x, y):
    x_increment, y_increment = call.increments
    batch = jnp.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    x, y = (jnp.broadcast_to(vector, (*batch, vector.shape[-1])) for vector in (x, y))
    from_x, from_y = elements(x, call.n, x_increment), elements(y, call.n, y_increment)
    return [set_strided(x, from_y, x_increment), set_strided(y, from_x, y_increment)]


# --- level 2 ------------------------------------------------------------------------------------


def transpose(x, op: str):
    """op(x) of a matrix."""
    x = x if op == "N" else jnp.swapaxes(x, -1, -2)
    return x.conj() if op == "C" else x


def matmul(call, a, b):
    """Multiply at the precision of the call's options; 16-bit floats are accumulated in float32."""
    precision = lax.Precision.DEFAULT if call.options.math == "tf32" else lax.Precision.HIGHEST
    return jnp.matmul(a, b, precision=precision, preferred_element_type=scale_dtype(a.dtype))


def _update_vector(call, scalars, product, y):
    """The sum alpha * product + beta * y in y's elements; without y, a new vector."""
    if y is None:
        return _update(scalars, product, None)
    old = elements(y, product.shape[-1], call.increments[1])
    return set_strided(y, _update(scalars, product, old), call.increments[1])


def _gemv(call, scalars, a, x, y=None):
    matrix = transpose(a, call.op_a)
    x = elements(x, matrix.shape[-1], call.increments[0])
    product = matmul(call, matrix, x[..., None])[..., 0]
    return _update_vector(call, scalars, product, y).astype(a.dtype)


def _gbmv(call, scalars, a, x, y=None):
    rows, columns, width = a.shape[-2], call.columns, a.shape[-1]
    column, exists = band_index(rows, columns, call.kl, call.ku)
    if 0 in (rows, columns):
        batch = jnp.broadcast_shapes(a.shape[:-2], x.shape[:-1])
        product = jnp.zeros((*batch, rows if call.op_a == "N" else columns), scale_dtype(a.dtype))
        return _update_vector(call, scalars, product, y).astype(a.dtype)
    # What is stored outside the matrix may be anything.
    a_wide = jnp.where(exists, wide(a), 0)
    if call.op_a == "N":
        x = wide(elements(x, columns, call.increments[0]))
        product = (a_wide * x[..., column]).sum(-1)
    else:
        x = wide(elements(x, rows, call.increments[0]))
        row = np.arange(columns)[:, None] - np.arange(width) + call.kl
        inside = (row >= 0) & (row < rows)
        row = np.clip(row, 0, rows - 1)
        picked = jnp.where(inside, a_wide[..., row, np.arange(width)], 0)
        product = (picked * x[..., row]).sum(-1)
    return _update_vector(call, scalars, product, y).astype(a.dtype)


def _solve(call, a, b):
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return lax.linalg.triangular_solve(
        jnp.broadcast_to(wide(a), (*batch, *a.shape[-2:])),
        jnp.broadcast_to(b, (*batch, *b.shape[-2:])),
        left_side=not call.right,
        lower=not call.upper,
        transpose_a=call.op_a != "N",
        conjugate_a=call.op_a == "C",
        unit_diagonal=call.unit,
    )


def _trsv(call, scalars, a, b):
    values = wide(elements(b, a.shape[-1], call.increments[0]))
    return set_strided(b, _solve(call, a, values[..., None])[..., 0], call.increments[0])


# --- level 3 ------------------------------------------------------------------------------------


def _trsm(call, scalars, a, b):
    return _solve(call, a, _times(scalars[0], wide(b))).astype(b.dtype)


def _gemm(call, scalars, a, b, c=None):
    product = matmul(call, transpose(a, call.op_a), transpose(b, call.op_b))
    return _update(scalars, product, c).astype(a.dtype)


_ROUTINES = {
    "iamax": _iamax,
    "iamin": _iamin,
    "asum": _asum,
    "nrm2": _nrm2,
    "dot": _dot,
    "scal": _scal,
    "axpy": _axpy,
    "gemv": _gemv,
    "gbmv": _gbmv,
    "trsv": _trsv,
    "trsm": _trsm,
    "gemm": _gemm,
}
