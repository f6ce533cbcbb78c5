"""What products of parts must get right: data of every kind, and how far off they may be."""

import jax.numpy as jnp
import numpy as np
from random_arrays import normal, widened

PRESETS = (
    "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
    "TF32_TF32_F32_X3",
)
# What the products that are left out add up to at most, of |A| |B| (docs/precise.md).
LEFT_OUT = dict(zip(PRESETS, (2.0**-15, 2.0**-24, 0, 2.0**-21), strict=True))
# What adding up hundreds of products in float32 may be off, of |A| |B|.
ADDING = 3 * 2.0**-24
SMALLEST = float(jnp.finfo(jnp.float32).tiny)


def operands(kind: str, m: int, n: int, k: int, dtype="float32", seed=0):
    """A (m, k) and B (k, n) of a kind in `KINDS`."""
    a = np.array(normal(m, k, seed=2 * seed, dtype=dtype))
    b = np.array(normal(k, n, seed=2 * seed + 1, dtype=dtype))
    return tuple(map(jnp.asarray, KINDS[kind](a, b, np.random.default_rng([seed, m, n, k]))))


def _ill_conditioned(a, b, rng):
    """The second half of each sum takes back nearly all of the first."""
    half = a.shape[1] // 2
    a[:, half : 2 * half], b[half : 2 * half] = a[:, :half], -b[:half]
    b[half : 2 * half] *= 1 + 2.0**-20 * rng.standard_normal((half, b.shape[1]))
    return a, b.astype(a.dtype)


def _wide(a, b, rng):
    """1e-30 to 1e30 from row to row and column to column, never so much in a product."""
    rows = 10.0 ** rng.uniform(-30, 30, (len(a), 1))
    columns = 10.0 ** rng.uniform(-5, 5, (1, b.shape[1]))
    return (a * rows).astype(a.dtype), (b * columns).astype(b.dtype)


def _wide_rows(a, b, rng):
    """The same within each row, and the reverse within each column."""
    scales = 10.0 ** rng.uniform(-30, 30, a.shape[1])
    return (a * scales).astype(a.dtype), (b / scales[:, None]).astype(b.dtype)


def _tiny(a, b, rng):
    """Some subnormal, times numbers that bring products back."""
    return (a * 1e-37).astype(a.dtype), (b * 1e30).astype(b.dtype)


KINDS = {
    "normal": lambda a, b, rng: (a, b),
    "positive": lambda a, b, rng: (abs(a).astype(a.dtype), abs(b).astype(b.dtype)),
    "ill-conditioned": _ill_conditioned,
    "wide": _wide,
    "wide rows": _wide_rows,
    "tiny": _tiny,
}


def exact(a, b):
    """The product and |A| |B| in float64."""
    return widened(a) @ widened(b), abs(widened(a)) @ abs(widened(b))


def excess(got, a, b, preset: str, adding: float = ADDING) -> float:
    """The largest error by what it may be; more than 1 is wrong.

    Below `SMALLEST` parts have fewer bits, or none, on a CPU: an error of that much in an operand.
    """
    product, magnitude = exact(a, b)
    flushed = abs(widened(a)).sum(1)[:, None] + abs(widened(b)).sum(0)[None]
    allowed = (LEFT_OUT[preset] + adding) * magnitude + 2 * SMALLEST * (flushed + a.shape[1])
    return float((abs(widened(got) - product) / allowed).max())
