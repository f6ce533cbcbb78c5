"""Public `newton_schulz`: Newton-Schulz iterations of stacked matrices, as Muon runs them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.device.dense.product import LEAST_SYMMETRIC
from jax_tcgemm.primitives.encodings.plain import Plain
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import ShapeError, as_floating, call_options, real_number
from jax_tcgemm.products.epilogue import with_encoded_epilogue
from jax_tcgemm.products.gram import ScaledSum, symmetric_product, with_symmetric_epilogue
from jax_tcgemm.sharding.stacks import of_whole_matrices

MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_FORMS = (None, "gram", "standard")


def newton_schulz(
    g,
    *,
    steps: int = 5,
    coefficients: Sequence = MUON_COEFFICIENTS,
    dtype=jnp.bfloat16,
    eps: float = 1e-8,
    form: str | None = None,
    precision=None,
    implementation: str | None = None,
):
    """Orthogonalize matrices approximately by Newton-Schulz iterations, as the Muon optimizer does.

        x = g / (norm(g) + eps)
        repeat for (a, b, c):  x = a x + (b x x^T + c (x x^T)^2) x

    Each matrix of a stack is orthogonalized, and norm is the Frobenius norm. The iterations keep
    the singular vectors and bring the singular values close to 1: with the default coefficients,
    singular values above 0.0015 of the norm end in [0.68, 1.21]. Matrices with more rows than
    columns are multiplied from the other side, with x^T x instead of x x^T, without a transposed
    copy.

    All products except the products with x itself are symmetric. A GPU of compute capability 9.0
    computes symmetric products with half the work (see `gram`). The kernels' epilogues compute the
    sums.

    If explicit mesh axes shard the rows or columns of a stack, its matrices are divided among the
    devices of these axes: each device orthogonalizes whole matrices. A single sharded matrix is
    orthogonalized by every device. The result has the sharding of g.

    There are two forms. "standard" computes the three products above for each step. "gram" iterates
    on r = x x^T, the smaller matrix, where that is less work. For two steps together, "gram"
    computes q = (a2 + b2 r1 + c2 r1^2) (a1 + b1 r + c1 r^2), where r1 is r after the first step,
    and then x <- q x. The next steps restart with r of the new x, because rounding errors of r
    would otherwise grow. The count of multiplications includes the restarts. See Numerics.

    Args:
      g: array of shape (..., m, n) of a real floating-point dtype.
      steps: number of iterations, at least 1.
      coefficients: a triple of numbers (a, b, c), or a sequence of one triple for each step.
      dtype: dtype of the operands and results of all products: bfloat16, float16, float32 or
        float64.
      eps: a number or a 0-D array, added to the norm.
      form: "standard", "gram", or None, which selects the form with fewer multiplications.
      precision: precision of every product; see `matmul`.
      implementation: name of the implementation that must run every product; see `matmul`.

    Returns:
      An array of the shape and dtype of g.

    Raises:
      TypeError: if g is not a real floating-point array, or coefficients are not numbers.
      ValueError: if g has fewer than two dimensions, steps is below 1, coefficients have another
        shape, the form is unknown, or under the conditions of `matmul`.

    Numerics:
      - The norm and the epilogue of each product are computed in float32, and each result is
        rounded to dtype. float32 is multiplied as TF32 on CUDA unless the precision specifies
        otherwise.
      - In bfloat16, r has rounding errors of about `2**-9` of its largest eigenvalue. The errors
        make some small eigenvalues negative. Each step without a new r multiplies a negative
        eigenvalue by more than `a**2`. "gram" therefore combines only as many steps as keep the
        result below 1 (0.8 if two or more steps follow). With the default coefficients, five steps
        are combined as 2, 2 and 1, and eight steps as 2, 1, 1, 1, 2 and 1.
      - In bfloat16, the relative Frobenius error against float64 for matrices of 192 to 768 rows
        was 0.012 to 0.017 for random matrices (standard: 0.010 to 0.013), and 0.043 to 0.074 for
        singular values over five decades (standard: 0.050 to 0.094). Singular values were at most
        1.21 in both forms. For 240 000 matrices of 2 to 8 rows, most of them nearly singular,
        singular values were at most 1.36 (standard: 1.21). With three steps combined, up to a tenth
        of such small matrices diverged. Steeper coefficients, such as Polar Express, allow fewer
        combined steps, so the two forms are nearly equal.

    Source:
      K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
      https://kellerjordan.github.io/posts/muon/

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> g = jax.random.normal(jax.random.key(0), (2, 64, 128))
      >>> x = jax_tcgemm.newton_schulz(g)
      >>> x.shape, x.dtype
      ((2, 64, 128), dtype('float32'))
      >>> values = jnp.linalg.svd(x, compute_uv=False)
      >>> bool(values.min() > 0.65), bool(values.max() < 1.25)
      (True, True)
    """
    (result,) = newton_schulz_of_equal(
        [g],
        steps=steps,
        coefficients=coefficients,
        dtype=dtype,
        eps=eps,
        form=form,
        precision=precision,
        implementation=implementation,
    )
    return result


def newton_schulz_of_equal(
    arrays: Sequence,
    *,
    steps,
    coefficients,
    dtype,
    eps,
    form=None,
    precision=None,
    implementation=None,
) -> list:
    """Return `newton_schulz` of arrays of one shape and dtype, which are computed as one stack."""
    op = "newton_schulz"
    arrays = [as_floating(op, "g", g) for g in arrays]
    g, *_ = arrays
    if g.ndim < 2:
        raise ShapeError(
            f"{op}: g must have two dimensions or more, got g.shape={g.shape}; reshape it"
        )
    dtype = _canonical_dtype(op, dtype)
    triples = canonical_coefficients(op, "coefficients", coefficients, "steps", steps)
    if form not in _FORMS:
        raise ValueError(
            f'{op}: form must be None, "gram" or "standard", got {form=}; None selects'
        )
    segments = (1,) * len(triples)
    if form != "standard":
        together = stable_segments(triples, _noise(dtype))
        sizes = sorted(g.shape[-2:])
        if form == "gram" or multiplications(*sizes, together) < multiplications(*sizes, segments):
            segments = together
    spec = _Spec(
        call_options(op, implementation),
        dtype,
        triples,
        segments,
        canonical_precision(op, precision),
        g.shape[-2] > g.shape[-1],
    )
    if not (hasattr(eps, "shape") and np.ndim(eps) == 0):
        eps = real_number(op, "eps", eps)
    return _newton_schulz(spec, arrays, eps)


def canonical_coefficients(op: str, name: str, coefficients, steps_name: str, steps) -> tuple:
    """Return a triple of floats for each step.

    Raises:
      TypeError: for coefficients or steps that are no numbers known while tracing.
      ValueError: for another shape, and fewer than one step.
    """
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer):
        raise TypeError(
            f"{op}: {steps_name} must be an int, got {steps_name} of type {type(steps).__name__}; "
            "it is static"
        )
    if steps < 1:
        raise ValueError(f"{op}: {steps_name} must be 1 or more, got {steps_name}={steps}")
    try:
        found = np.asarray(coefficients, np.float64)
    except (TypeError, ValueError, jax.errors.TracerArrayConversionError) as error:
        if isinstance(error, ValueError):  # ragged
            raise ValueError(_shape_message(op, name, coefficients)) from None
        raise TypeError(
            f"{op}: {name} must be numbers, got {name} of type {type(coefficients).__name__}; they "
            "are static"
        ) from None
    if found.shape not in ((3,), (steps, 3)):
        raise ValueError(
            f"{op}: {name} must be three numbers or as many triples as {steps_name}={steps}, got "
            f"{name} of shape {found.shape}; give (a, b, c) for each step"
        )
    return tuple(map(tuple, np.broadcast_to(found, (int(steps), 3)).tolist()))


def _shape_message(op: str, name: str, coefficients) -> str:
    return (
        f"{op}: {name} must be three numbers or triples of them, got {name}={coefficients!r}; give "
        "(a, b, c) for each step"
    )


def _canonical_dtype(op: str, dtype) -> np.dtype:
    try:
        found = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    except (TypeError, ValueError):
        found = None
    if found not in map(np.dtype, (jnp.bfloat16, np.float16, np.float32, np.float64)):
        raise TypeError(
            f"{op}: dtype must be bfloat16, float16, float32 or float64, got {dtype=}; the result "
            "has the dtype of g"
        )
    return found


# --- which form ---------------------------------------------------------------------------------


def _noise(dtype: np.dtype) -> float:
    """Bound the relative error of a product's eigenvalues: two roundings of an operand.

    float32 is rounded to TF32 on CUDA, which has as many bits of mantissa as float16.
    """
    if dtype == np.float64:
        return float(np.finfo(np.float64).eps)
    return 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-10


def stable_segments(triples: Sequence, noise: float) -> tuple[int, ...]:
    """Return how many steps are computed from one x x^T, for all of the steps.

    An error of x x^T makes an eigenvalue -e of a singular value that is at most sqrt(e) in x,
    with e = noise * the largest eigenvalue. A segment takes another step as long as the polynomials
    of -e times sqrt(e) stay small: below 0.8, or below 1 where at most one step follows. Errors are
    now and then larger than e, and later steps would amplify singular values above 1.26.
    """
    lengths, largest, done = [], 1.0, 0
    while done < len(triples):
        error, stop = noise * largest**2, done + 1
        while stop < len(triples):
            limit = 1 if stop + 2 >= len(triples) else 0.8
            if _amplified(triples[done : stop + 1], error) > limit:
                break
            stop += 1
        for a, b, c in triples[done:stop]:
            x = np.linspace(0, largest, 1025)
            largest = float(np.abs(a * x + b * x**3 + c * x**5).max())
        lengths.append(stop - done)
        done = stop
    return tuple(lengths)


def _amplified(triples: Sequence, error: float) -> float:
    """Return what steps make of sqrt(error), multiplying by polynomials of -error."""
    product, eigenvalue = math.sqrt(error), -error
    for a, b, c in triples:
        factor = a + b * eigenvalue + c * eigenvalue**2
        product, eigenvalue = product * factor, eigenvalue * factor**2
    return abs(product)


def multiplications(m: int, n: int, segments: Sequence[int]) -> float:
    """Count the multiplications of (m, n) matrices, m <= n, in steps that segments take together.

    A segment has the products x x^T and q x with n columns, and of (m, m) matrices, all of them
    symmetric, one for the polynomial of each step, and for each step but the last two for r and one
    for q. Symmetric products count half from 256 rows on. Segments of one step are the standard
    form.
    """
    symmetric = m * m / 2 if m >= LEAST_SYMMETRIC else m * m
    small = sum(length + 3 * (length - 1) for length in segments)
    return len(segments) * (symmetric + m * m) * n + small * symmetric * m


# --- the iteration ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Static parameters of a call.

    Attributes:
      options: options of every product.
      dtype: of operands and results of products.
      triples: coefficients of each step.
      segments: numbers of steps that are computed from one x x^T.
      precision: of every product, canonical.
      is_tall: whether matrices have more rows than columns, and are multiplied from the right.
    """

    options: CallOptions
    dtype: np.dtype
    triples: tuple
    segments: tuple[int, ...]
    precision: object
    is_tall: bool


@functools.partial(jax.jit, static_argnums=0)
def _newton_schulz(spec: _Spec, arrays: Sequence, eps) -> list:
    normalized = [_normalized(spec, g, eps) for g in arrays]
    is_one = len(arrays) == 1
    x = normalized[0] if is_one else jnp.stack(normalized)
    x = of_whole_matrices(functools.partial(_iterated, spec), x)
    results = [x] if is_one else list(x)
    return [x.astype(g.dtype) for x, g in zip(results, arrays, strict=True)]


def _normalized(spec: _Spec, g: jax.Array, eps) -> jax.Array:
    wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
    norm = jnp.sqrt(jnp.sum(wide * wide, (-2, -1), keepdims=True))
    return (wide / (norm + jnp.asarray(eps, wide.dtype))).astype(spec.dtype)


def _iterated(spec: _Spec, x: jax.Array) -> jax.Array:
    # Arrays, so that one kernel serves all steps: numbers would be constants of its source.
    triples = iter(jnp.asarray(spec.triples, wide_dtype(spec.dtype)))
    for length in spec.segments:
        x = _segment(spec, x, list(itertools.islice(triples, length)))
    return x


def _segment(spec: _Spec, x: jax.Array, triples: Sequence) -> jax.Array:
    """Compute steps from one x x^T."""
    symmetric = functools.partial(
        symmetric_product, spec.options, dtype=spec.dtype, precision=spec.precision
    )
    r = symmetric(x, x, axis=-2 if spec.is_tall else -1)
    (a, b, c), *others = triples
    if not others:
        return _multiplied(spec, symmetric(r, r, r, alpha=c, beta=b), x, a)
    q = _polynomial(spec, r, a, b, c)
    r = symmetric(symmetric(q, r), q)
    for i, (a, b, c) in enumerate(others, 1):
        t = symmetric(r, r, r, alpha=c, beta=b)
        q = symmetric(t, q, q, beta=a)
        if i < len(others):
            p = symmetric(t, r, r, beta=a)
            r = symmetric(t, p, p, beta=a)
    return _multiplied(spec, q, x)


def _polynomial(spec: _Spec, r: jax.Array, a, b, c) -> jax.Array:
    """Return a + b r + c r^2."""
    index = jnp.arange(r.shape[-1], dtype=jnp.int32)
    operands = (r, a, b, c, index[:, None], index)
    return with_symmetric_epilogue(
        spec.options, r, r, _quadratic, operands, precision=spec.precision
    )


def _quadratic(acc, r, a, b, c, rows, columns):
    """Epilogue of r r: a + b r + c r^2 in the dtype of r."""
    diagonal = jnp.where(rows == columns, a, jnp.zeros_like(a))
    return (c * acc + b * r.astype(acc.dtype) + diagonal).astype(r.dtype)


def _multiplied(spec: _Spec, q: jax.Array, x: jax.Array, a=None) -> jax.Array:
    """Return a x + q x, or with tall matrices a x + x q; without a just the product."""
    batch = tuple(range(x.ndim - 2))
    rows, columns = x.ndim - 2, x.ndim - 1
    lhs, rhs = (x, q) if spec.is_tall else (q, x)
    encoding = Plain.of(lhs, rhs, (((columns,), (rows,)), (batch, batch)), precision=spec.precision)
    terms, scalars = ScaledSum.of(spec.dtype, 1.0, 0.0 if a is None else a)
    operands = () if a is None else (x, *scalars)
    return with_encoded_epilogue(spec.options, encoding, (lhs, rhs), terms, operands)
