"""Public `Fp8DotGeneral`: 8-bit products for training."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from jax_tcgemm.problem.dtypes import FLOAT8
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import (
    as_floating,
    canonical_element_type,
    canonical_sharding,
    promoted_dtype,
)
from jax_tcgemm.products.dot_general import canonical_dimension_numbers, dot_general
from jax_tcgemm.quantization.over_devices import over_devices
from jax_tcgemm.quantization.quantize import quantize
from jax_tcgemm.sharding import shardings
from jax_tcgemm.sharding.partitioning import resharded

# Arguments of `quantize` for activations and gradients, and for weights.
RECIPES = {
    "current": ({}, {}),
    "block128": ({"block": (1, 128)}, {"block": (128, 128)}),
}


@dataclasses.dataclass(frozen=True)
class Fp8DotGeneral:
    """`dot_general` that multiplies 8-bit floats in the forward and backward pass.

        out = q(lhs) * q(rhs),   lhs_bar = g(out_bar) * q(rhs),   rhs_bar = q(lhs) * g(out_bar)

    q rounds to float8_e4m3fn and g rounds to `grad_dtype`. Each operand of each product is
    quantized along the dimensions that the product contracts, with its own scales.

    Pass an instance or the class where a library accepts a `dot_general`, such as Flax:
    ``nnx.Linear(..., dot_general=Fp8DotGeneral())``, ``nn.Dense(...,
    dot_general_cls=Fp8DotGeneral)``. Parameters and their gradients keep their dtypes, and there is
    no state.

    For the gradients, a call stores both operands only in 8 bits, transposed.
    `jax.checkpoint_policies.save_only_these_names("fp8_operands")` saves these operands under
    `jax.remat`.

    Args:
      recipe: "current" uses one per-tensor scale per array, from its largest magnitude. "block128"
        uses block scales, as in the training of DeepSeek-V3: blocks of 1 by 128 for lhs and
        gradients, and blocks of 128 by 128 for rhs, which is assumed to be the weight.
      grad_dtype: dtype of quantized gradients, float8_e5m2 or, for recipes with small blocks,
        float8_e4m3fn.

    Raises:
      TypeError: if grad_dtype is another dtype. A call raises TypeError if operands are not real
        floating-point arrays.
      ValueError: if the recipe is unknown. A call raises ValueError under the conditions of
        `dot_general`.

    Numerics:
      Quantization follows `quantize`, and products follow `dot_general` of `QuantizedArray`s.
      Accumulators are float32, are scaled, and are rounded once to preferred_element_type or else
      to the dtype that the operands promote to. The cotangents of both operands are not rounded to
      8 bits, but to the dtypes of the operands.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x, w = jax.random.normal(jax.random.key(0), (2, 256, 256))
      >>> product = jax_tcgemm.Fp8DotGeneral("block128")
      >>> f = lambda x, w: product(x, w, (((1,), (0,)), ((), ())))
      >>> y, pullback = jax.vjp(f, x, w)
      >>> [round(float(jnp.corrcoef(a.ravel(), b.ravel())[0, 1]), 2)
      ...     for a, b in [(y, x @ w), (pullback(y)[0], (x @ w) @ w.T)]]
      [1.0, 1.0]
    """

    recipe: str = "current"
    grad_dtype: object = jnp.float8_e5m2

    def __post_init__(self):
        check_recipe("Fp8DotGeneral", self)

    def __call__(
        self,
        lhs,
        rhs,
        dimension_numbers,
        precision=None,
        preferred_element_type=None,
        *,
        out_sharding=None,
    ) -> jax.Array:
        """Return the product; the arguments are the arguments of `jax_tcgemm.dot_general`."""
        run = functools.partial(_product, self)
        how = precision, preferred_element_type, out_sharding
        return by_rows("Fp8DotGeneral", run, lhs, rhs, dimension_numbers, *how)


def check_recipe(op: str, product) -> None:
    """Check the recipe and grad_dtype of an 8-bit function; make grad_dtype canonical."""
    if not isinstance(product.recipe, str) or product.recipe not in RECIPES:
        raise ValueError(
            f"{op}: recipe must be {' or '.join(RECIPES)}, got recipe={product.recipe!r}; "
            "delayed scaling, which keeps state, is jax_tcgemm.quantization.flax."
            "DelayedFp8DotGeneral"
        )
    try:
        dtype = canonical_element_type(op, product.grad_dtype)
    except TypeError:
        dtype = None
    if dtype not in FLOAT8:
        raise TypeError(
            f"{op}: grad_dtype must be {' or '.join(map(str, FLOAT8))}, got grad_dtype="
            f"{product.grad_dtype!r}; see jax.numpy"
        )
    object.__setattr__(product, "grad_dtype", dtype)


@dataclasses.dataclass(frozen=True)
class How:
    """Static parameters of a product (*batch, m, k) times (*batch, n, k).

    Attributes:
      precision: as for `jax_tcgemm.dot_general`.
      dtype: dtype of the result.
      operands: dtypes of the operands and of their cotangents.
      are_columns: for each operand, whether it and its cotangent are stored as (*batch, k, m) or
        (*batch, k, n), as weights are in most layers. Quantization along both dimensions needs no
        transposition first.
      out_sharding: sharding of the result over explicit mesh axes, or None.
      shardings: shardings of the operands, as stored, and of their cotangents over explicit mesh
        axes.
    """

    precision: object
    dtype: np.dtype
    operands: tuple[np.dtype, np.dtype]
    are_columns: tuple[bool, bool] = (False, False)
    out_sharding: NamedSharding | None = None
    shardings: tuple[NamedSharding | None, NamedSharding | None] = (None, None)


def by_rows(
    op, run, lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding
) -> jax.Array:
    """Check the arguments of a `dot_general` and run it as a product of rows.

    Args:
      op: the public function, for messages.
      run: run(how, lhs, rhs), with a `How` and operands stored as it says.
      lhs: as for `jax_tcgemm.dot_general`, like the other arguments.
      rhs: ...
      dimension_numbers: ...
      precision: ...
      preferred_element_type: ...
      out_sharding: ...
    """
    lhs, rhs = as_floating(op, "lhs", lhs), as_floating(op, "rhs", rhs)
    contract, batch = canonical_dimension_numbers(op, dimension_numbers, lhs, rhs)
    dtype = canonical_element_type(op, preferred_element_type)
    dtype = promoted_dtype(op, lhs, rhs) if dtype is None else dtype
    shape = [[lhs.shape[axis] for axis in batch[0]]]
    folded = []
    for x, contracted, batched in zip((lhs, rhs), contract, batch, strict=True):
        free = [axis for axis in range(x.ndim) if axis not in (*contracted, *batched)]
        shape.append([x.shape[axis] for axis in free])
        folded.append(_folded(x, batched, free, contracted))
    (lhs_columns, lhs), (rhs_columns, rhs) = folded
    dtypes = lhs.dtype, rhs.dtype
    of_batch, of_lhs, of_rhs = shape
    out_sharding = canonical_sharding(op, out_sharding, sum(map(len, shape)))
    how = How(
        canonical_precision(op, precision),
        dtype,
        dtypes,
        (lhs_columns, rhs_columns),
        shardings.merged(out_sharding, (*[1] * len(of_batch), len(of_lhs), len(of_rhs))),
        (shardings.explicit(lhs), shardings.explicit(rhs)),
    )
    out = run(how, lhs, rhs)
    # One dimension at a time, as explicit mesh axes require.
    out = out.reshape(*of_batch, *of_lhs, out.shape[-1]).reshape(*of_batch, *of_lhs, *of_rhs)
    return resharded(out, out_sharding)


def _folded(x, batch, free, contract) -> tuple[bool, jax.Array]:
    """Whether an operand is stored as columns, and the operand as columns or rows; see `How`."""
    is_columns = [*batch, *contract, *free] == list(range(x.ndim)) and bool(free and contract)
    groups = (contract, free) if is_columns else (free, contract)
    # Of dimensions that are merged, only the first may be sharded.
    x = resharded(x, shardings.whole(x, (*free[1:], *contract[1:])))
    of_batch, first, second = ([x.shape[axis] for axis in axes] for axes in (batch, *groups))
    x = lax.transpose(x, (*batch, *groups[0], *groups[1]))
    x = x.reshape(*of_batch, *first, math.prod(second))
    return is_columns, x.reshape(*of_batch, math.prod(first), math.prod(second))


def as_rows(x, is_columns: bool) -> jax.Array:
    """An operand as (*batch, rows, depth)."""
    return jnp.swapaxes(x, -1, -2) if is_columns else x


def rows_and_columns(made, is_columns: bool):
    """Order a pair, made from an operand as stored and from its transpose, as rows and columns."""
    return made[::-1] if is_columns else made


def product_of_rows(lhs, rhs, how: How, dtype, out_sharding=None) -> jax.Array:
    """Product (..., m, k) times (..., n, k)."""
    batch = tuple(range(lhs.ndim - 2))
    numbers = (((lhs.ndim - 1,), (rhs.ndim - 1,)), (batch, batch))

    def run(lhs, rhs, out_sharding):
        return dot_general(lhs, rhs, numbers, how.precision, dtype, out_sharding=out_sharding)

    names = (*batch, "m", "k"), (*batch, "n", "k"), (*batch, "m", "n")
    return over_devices(run, lhs, rhs, names, out_sharding)


def cotangents(how: How, gradient, lhs_columns, rhs_columns) -> tuple[jax.Array, jax.Array]:
    """Cotangents of both operands, stored and sharded as the operands, by products of rows.

    `gradient`: the cotangent of the result, quantized by rows and by columns.
    """

    def product(which: int, own, other):
        pair = (other, own) if how.are_columns[which] else (own, other)
        return product_of_rows(*pair, how, how.operands[which], how.shardings[which])

    rows, columns = gradient
    return product(0, rows, rhs_columns), product(1, columns, lhs_columns)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(product: Fp8DotGeneral, how: How, lhs, rhs) -> jax.Array:
    of_lhs, of_rhs = RECIPES[product.recipe]
    lhs, rhs = map(as_rows, (lhs, rhs), how.are_columns)
    return product_of_rows(
        quantize(lhs, **of_lhs), quantize(rhs, **of_rhs), how, how.dtype, how.out_sharding
    )


def _forward(product: Fp8DotGeneral, how: How, lhs, rhs):
    of_lhs, of_rhs = RECIPES[product.recipe]
    lhs = quantize(lhs, **of_lhs, with_transpose=True)
    rhs = quantize(rhs, **of_rhs, with_transpose=True)
    (lhs, lhs_columns), (rhs, rhs_columns) = map(rows_and_columns, (lhs, rhs), how.are_columns)
    kept = checkpoint_name((lhs_columns, rhs_columns), "fp8_operands")
    return product_of_rows(lhs, rhs, how, how.dtype, how.out_sharding), kept


def _backward(product: Fp8DotGeneral, how: How, kept, cotangent):
    of_gradients, _ = RECIPES[product.recipe]
    gradient = quantize(cotangent, product.grad_dtype, **of_gradients, with_transpose=True)
    return cotangents(how, gradient, *kept)


_product.defvjp(_forward, _backward)
