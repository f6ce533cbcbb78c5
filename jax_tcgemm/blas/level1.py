"""BLAS level 1: functions of vectors.

Every vector may have batch dimensions in front, which broadcast, and an increment: only every
increment-th element takes part, beginning with the first, and the others are passed on.
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
from jax_tcgemm.problem.blas_call import DEFAULT_OPTIONS, Call, Options
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
    """The index of the first element of largest |re| + |im|, counted from 0.

        i = argmax over i in [0, n) of |re x[i * increment]| + |im x[i * increment]|

    Args:
      x: vector (..., length) of a floating or complex dtype.
      n: how many elements take part; None takes all that the increment reaches.
      increment: distance of the elements, at least 1.
      implementation: "cublas", "host" or "xla", which then runs the call or it fails; None selects.
      options: `blas.Options`: how cuBLAS computes.

    Returns:
      int32 (...): the index among the elements that take part, so that it is element
      `index * increment` of `x`. Its derivative is zero. Where an element is NaN, which index is
      returned is not defined.

    Raises:
      TypeError: for arrays or dtypes that BLAS does not have.
      ValueError: for an increment below 1, an `n` that the vector is too short for, no element at
        all, or an implementation that cannot run here.

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
    """The index of the first element of smallest |re| + |im|; all else as `iamax`.

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
    """The largest |re| + |im|: that of the element `iamax` finds; arguments as there.

    The result has the dtype of the components. It can be differentiated wherever one element is
    the largest; of several the first counts.

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
    """The smallest |re| + |im|; all else as `amax`.

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
    """The sum of absolute values, |re| + |im| for complex numbers.

        s = sum over i in [0, n) of |re x[i * increment]| + |im x[i * increment]|

    Arguments and errors are those of `iamax`; an empty vector sums to 0.

    Returns:
      (...): of the components' dtype; half types are summed in float32 and rounded once.

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
    """The Euclidean norm.

        s = sqrt(sum over i in [0, n) of |x[i * increment]|^2)

    Arguments and errors are those of `iamax`; an empty vector has norm 0. Squares that float32 or
    float64 could not hold do no harm. The derivative at a zero vector is NaN.

    Returns:
      (...): of the components' dtype; half types are summed in float32 and rounded once.

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
    """The product of two vectors: BLAS's dotu, and dotc with `conjugate`.

        s = sum over i in [0, n) of op(x[i * increment_x]) * y[i * increment_y]

    Args:
      x: vector (..., length).
      y: vector (..., length); dtypes promote.
      conjugate: whether op conjugates.
      n: how many elements take part; None takes all, and both vectors must have as many.
      increment_x: distance of x's elements.
      increment_y: distance of y's.
      implementation: as of `iamax`.
      options: as of `iamax`.

    Returns:
      (...): of the vectors' dtype; half types are summed in float32 and rounded once.

    Raises:
      TypeError: for arrays or dtypes that BLAS does not have.
      ValueError: for vectors of unlike or insufficient length, a bad increment, or an
        implementation that cannot run here.

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
    """A vector with elements scaled.

        out[i * increment] = alpha x[i * increment] for i in [0, n), and the others as in x

    Args:
      alpha: a number, or a scalar array, which is then read on the device.
      x: vector (..., length); updated in place where it is donated.
      n: as of `iamax`.
      increment: as of `iamax`.
      implementation: as of `iamax`.
      options: as of `iamax`.

    Returns:
      The new vector, of x's shape and dtype.

    Raises:
      TypeError: for arrays, dtypes or scalars that do not go together.
      ValueError: as `iamax`.

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
    """A vector plus a multiple of another.

        out[i * increment_y] = alpha x[i * increment_x] + y[i * increment_y] for i in [0, n)

    and the other elements as in y. Arguments are those of `dot` and `scal`; y is updated in place
    where it is donated.

    Returns:
      The new y.

    Raises:
      TypeError: for arrays, dtypes or scalars that do not go together.
      ValueError: as `dot`.

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
    """Two vectors that have exchanged x[i * increment_x] and y[i * increment_y] for i in [0, n).

    Arguments and errors are those of `dot`; both are updated in place where they are donated.

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
