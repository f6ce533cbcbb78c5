"""BLAS level 1: functions of vectors.

Every vector may have leading batch dimensions, which broadcast, and an increment. With an
increment, only every increment-th element takes part, starting with the first; the other elements
keep their values.
"""

import jax
import jax.numpy as jnp

from jax_tcgemm.blas.arguments import (
    arrays,
    bind,
    check_increment,
    check_options,
    scalars,
    vector_length,
)
from jax_tcgemm.problem.blas.call import DEFAULT_OPTIONS, Call, Options
from jax_tcgemm.products.arguments import check_flag


def _call(op, routine, vectors, n, implementation, options, *, factors=None, **fields):
    """A call on vectors, given as (array, increment) by name, and its operands, all checked.

    Args:
      op: the function.
      routine: of `Call`.
      vectors: x, and y where there is one.
      n: how many elements take part, or None.
      implementation: as of the function.
      options: as of the function.
      factors: alpha by name where there is one.
      **fields: more of `Call`.
    """
    check_options(op, implementation, options)
    given = arrays(op, dict.fromkeys(vectors, 1), **{name: x for name, (x, _) in vectors.items()})
    checked = {}
    for x, (name, (_, increment)) in zip(given, vectors.items(), strict=True):
        argument = f"increment_{name}" if len(vectors) > 1 else "increment"
        checked[name] = x, check_increment(op, argument, increment)
    changes, operands = scalars(op, given[0].dtype, **factors or {})
    call = Call(
        op,
        routine,
        n=vector_length(op, n, **checked),
        increments=(*(increment for _, increment in checked.values()), 1)[:2],
        options=options,
        implementation=implementation,
        **fields,
        **changes,
    )
    return call, (*given, *operands)


def _index(op, routine, x, n, increment, implementation, options):
    """The increment and x, both checked, and the index that a routine finds."""
    call, (x,) = _call(op, routine, {"x": (x, increment)}, n, implementation, options)
    if call.n == 0:
        raise ValueError(
            f"{op}: x must have an element, got x.shape={x.shape} and n={call.n}; "
            "an empty vector has no largest or smallest"
        )
    return call.increments[0], x, bind(call, x)[0]


def iamax(
    x,
    *,
    n: int | None = None,
    increment: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Index of the first element with the largest |re| + |im|, counted from 0.

        i = argmax over i in [0, n) of |re x[i * increment]| + |im x[i * increment]|

    Args:
      x: vector of shape (..., length), of a floating or complex dtype.
      n: number of elements that take part. None takes all elements that the increment reaches.
      increment: distance between elements, at least 1.
      implementation: "cublas", "host" or "xla", which must run the call; the call fails if the
        implementation cannot. None selects an implementation.
      options: `blas.Options` for cuBLAS.

    Returns:
      int32 array of shape (...), the index among the elements that take part: element `index *
      increment` of `x`. The derivative is zero. If an element is NaN, the index is undefined.

    Raises:
      TypeError: if BLAS does not support the array or dtype.
      ValueError: if the increment is below 1, the vector is too short for `n`, there are no
        elements, or the implementation cannot run here.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> x = jnp.array([2.0, 4, 5, 1, 2, 4, 1, 5])
      >>> int(blas.iamax(x)), int(blas.iamax(x, increment=3))
      (2, 0)
    """
    return _index("blas.iamax", "iamax", x, n, increment, implementation, options)[-1]


def iamin(
    x,
    *,
    n: int | None = None,
    increment: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Index of the first element with the smallest |re| + |im|; see `iamax` for the rest.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> int(blas.iamin(jnp.array([2.0, -4, 1, -1])))
      2
    """
    return _index("blas.iamin", "iamin", x, n, increment, implementation, options)[-1]


def _extreme(op, routine, x, n, increment, implementation, options):
    """|re| + |im| of the element whose index a routine finds."""
    increment, x, index = _index(op, routine, x, n, increment, implementation, options)
    found = jnp.take_along_axis(x, index[..., None] * increment, axis=-1)[..., 0]
    if jnp.iscomplexobj(found):
        return jnp.abs(found.real) + jnp.abs(found.imag)
    return jnp.abs(found)


def amax(
    x,
    *,
    n: int | None = None,
    increment: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Largest |re| + |im| of the elements; see `iamax` for arguments and errors.

    The result is the |re| + |im| of the element that `iamax` finds, in the dtype of the components.
    The derivative is defined if one element is the largest; of several largest elements, the first
    counts.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> float(blas.amax(jnp.array([2.0, -4, 1])))
      4.0
    """
    return _extreme("blas.amax", "iamax", x, n, increment, implementation, options)


def amin(
    x,
    *,
    n: int | None = None,
    increment: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Smallest |re| + |im| of the elements; see `amax` for arguments and derivatives.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> float(blas.amin(jnp.array([2.0, -4, 1])))
      1.0
    """
    return _extreme("blas.amin", "iamin", x, n, increment, implementation, options)


def asum(
    x,
    *,
    n: int | None = None,
    increment: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Sum of absolute values, |re| + |im| for complex numbers.

        s = sum over i in [0, n) of |re x[i * increment]| + |im x[i * increment]|

    See `iamax` for arguments and errors. The sum of an empty vector is 0.

    Returns:
      Array of shape (...), of the dtype of the components. 16-bit dtypes accumulate in float32 and
      are rounded once.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> float(blas.asum(jnp.array([1 + 2j, -3 - 4j])))
      10.0
    """
    call, operands = _call("blas.asum", "asum", {"x": (x, increment)}, n, implementation, options)
    return bind(call, *operands)[0]


def nrm2(
    x,
    *,
    n: int | None = None,
    increment: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Euclidean norm.

        s = sqrt(sum over i in [0, n) of |x[i * increment]|^2)

    See `iamax` for arguments and errors. The norm of an empty vector is 0. Squares that overflow or
    underflow float32 or float64 do not affect the result. The derivative at a zero vector is NaN.

    Returns:
      Array of shape (...), of the dtype of the components. 16-bit dtypes accumulate in float32 and
      are rounded once.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> float(blas.nrm2(2.0**100 * jnp.array([3.0, 4]))) / 2.0**100
      5.0
    """
    call, operands = _call("blas.nrm2", "nrm2", {"x": (x, increment)}, n, implementation, options)
    return bind(call, *operands)[0]


def dot(
    x,
    y,
    *,
    conjugate: bool = False,
    n: int | None = None,
    increment_x: int = 1,
    increment_y: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Inner product of two vectors: BLAS's dotu, or dotc with `conjugate`.

        s = sum over i in [0, n) of op(x[i * increment_x]) * y[i * increment_y]

    Args:
      x: vector of shape (..., length).
      y: vector of shape (..., length). Dtypes of x and y promote.
      conjugate: whether op conjugates.
      n: number of elements that take part. None takes all elements, whose number must be equal in
        both vectors.
      increment_x: distance between elements of x.
      increment_y: distance between elements of y.
      implementation: name of an implementation; see `iamax`.
      options: `blas.Options`; see `iamax`.

    Returns:
      Array of shape (...), of the dtype of the vectors. 16-bit dtypes accumulate in float32 and are
      rounded once.

    Raises:
      TypeError: if BLAS does not support the arrays or dtypes.
      ValueError: if the vectors differ in length or are too short, an increment is below 1, or the
        implementation cannot run here.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> x, y = jnp.arange(1.0, 9), jnp.arange(9.0, 17)
      >>> float(blas.dot(x, y, n=2, increment_x=2, increment_y=4))  # 1 * 9 + 3 * 13
      48.0
    """
    vectors = {"x": (x, increment_x), "y": (y, increment_y)}
    op_a = "C" if check_flag("blas.dot", "conjugate", conjugate) else "N"
    call, operands = _call("blas.dot", "dot", vectors, n, implementation, options, op_a=op_a)
    return bind(call, *operands)[0]


def scal(
    alpha,
    x,
    *,
    n: int | None = None,
    increment: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Scale the elements of a vector.

        out[i * increment] = alpha x[i * increment] for i in [0, n), and the others as in x

    Args:
      alpha: a number, or a scalar array, which cuBLAS reads on the device.
      x: vector of shape (..., length), updated in place if donated.
      n: number of elements that take part; see `iamax`.
      increment: distance between elements; see `iamax`.
      implementation: name of an implementation; see `iamax`.
      options: `blas.Options`; see `iamax`.

    Returns:
      The new vector, of the shape and dtype of x.

    Raises:
      TypeError: if arrays, dtypes or scalars do not combine.
      ValueError: under the conditions of `iamax`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> blas.scal(10, jnp.arange(1.0, 6), increment=2).tolist()
      [10.0, 2.0, 30.0, 4.0, 50.0]
    """
    call, operands = _call(
        "blas.scal",
        "scal",
        {"x": (x, increment)},
        n,
        implementation,
        options,
        factors={"alpha": alpha},
        has_c=True,
    )
    return bind(call, *operands)[0]


def axpy(
    alpha,
    x,
    y,
    *,
    n: int | None = None,
    increment_x: int = 1,
    increment_y: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> jax.Array:
    """Add a multiple of one vector to another vector.

        out[i * increment_y] = alpha x[i * increment_x] + y[i * increment_y] for i in [0, n)

    Other elements equal the elements of y. See `dot` and `scal` for arguments. y is updated in
    place if donated.

    Returns:
      The new y.

    Raises:
      TypeError: if arrays, dtypes or scalars do not combine.
      ValueError: under the conditions of `dot`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> blas.axpy(2, jnp.ones(3), jnp.arange(3.0)).tolist()
      [2.0, 3.0, 4.0]
    """
    call, operands = _call(
        "blas.axpy",
        "axpy",
        {"x": (x, increment_x), "y": (y, increment_y)},
        n,
        implementation,
        options,
        factors={"alpha": alpha},
        has_c=True,
    )
    return bind(call, *operands)[0]


def swap(
    x,
    y,
    *,
    n: int | None = None,
    increment_x: int = 1,
    increment_y: int = 1,
    implementation: str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> tuple[jax.Array, jax.Array]:
    """Exchange x[i * increment_x] and y[i * increment_y] for i in [0, n).

    See `dot` for arguments and errors. Both vectors are updated in place if donated.

    Returns:
      The new x and y, each of its own shape.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_tcgemm import blas
      >>> x, y = blas.swap(jnp.arange(4.0), jnp.arange(10.0, 12), increment_x=2)
      >>> x.tolist(), y.tolist()
      ([10.0, 1.0, 11.0, 3.0], [0.0, 2.0])
    """
    vectors = {"x": (x, increment_x), "y": (y, increment_y)}
    call, operands = _call(
        "blas.swap", "swap", vectors, n, implementation, options, has_c=True, items=2
    )
    x, y = bind(call, *operands)
    return x, y
