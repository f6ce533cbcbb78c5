"""Public `Fp8RaggedDot`: grouped 8-bit products for training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import (
    ShapeError,
    as_floating,
    canonical_element_type,
    promoted_dtype,
)
from jax_tcgemm.products.ragged.arguments import as_offset, as_sizes
from jax_tcgemm.products.ragged.ragged_dot import ragged_dot, ragged_dot_general
from jax_tcgemm.quantization.fp8_dot_general import How
from jax_tcgemm.quantization.quantize import quantize
from jax_tcgemm.sharding.ragged_division import ends_of_groups

# Arguments of `quantize` for rows, forward and backward, and for the matrices of groups.
RECIPES = {
    "current": ({}, {"axis": (-2, -1)}),
    "block128": ({"block": (1, 128)}, {"block": (128, 128)}),
}
# Of two operands whose tokens are last.
_OVER_TOKENS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=(1,),
    rhs_group_dimensions=(),
)


@dataclasses.dataclass(frozen=True)
class Fp8RaggedDot:
    """`lax.ragged_dot` that multiplies 8-bit floats in the forward and backward pass.

        out = q(lhs) * q(rhs),   lhs_bar = q(out_bar) * q(rhs),   rhs_bar = q(lhs) * q(out_bar)

    q rounds to float8_e4m3fn. Each operand of each product is quantized along the dimensions that
    the product contracts, with its own scales; rhs_bar contracts the rows of each group. Rows of no
    group count as zeros, whatever they contain. Use `Fp8RaggedDot` for the experts of a model in
    training, and `Fp8DotGeneral` for its other layers.

    For the gradients, a call stores both operands only in 8 bits, transposed.
    `jax.checkpoint_policies.save_only_these_names("fp8_operands")` saves these operands under
    `jax.remat`.

    Args:
      recipe: "current" uses one scale for each array of rows and for each group's matrix, from the
        largest magnitude. "block128" uses block scales, as in the training of DeepSeek-V3: blocks
        of 1 by 128 for rows and gradients, and blocks of 128 by 128 for matrices.

    Raises:
      TypeError: a call raises TypeError if operands are not real floating-point arrays, and under
        the conditions of `ragged_dot`.
      ValueError: if the recipe is unknown. A call raises ValueError under the conditions of
        `ragged_dot`.

    Numerics:
      Quantization follows `quantize`, and products follow `ragged_dot` of `QuantizedArray`s.
      Accumulators are float32, are scaled, and are rounded once to preferred_element_type or else
      to the dtype that the operands promote to. The cotangents of both operands are rounded to the
      dtypes of the operands. Quantized gradients are float8_e4m3fn, like the operands, because no
      grouped kernel multiplies different 8-bit floats.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x = jax.random.normal(jax.random.key(0), (256, 128))
      >>> w = jax.random.normal(jax.random.key(1), (4, 128, 128))
      >>> sizes = jnp.array([100, 0, 56, 90])
      >>> y = jax_tcgemm.Fp8RaggedDot("block128")(x, w, sizes)
      >>> exact = jax.lax.ragged_dot(x, w, sizes)
      >>> round(float(jnp.corrcoef(y.ravel(), exact.ravel())[0, 1]), 2)
      1.0
    """

    recipe: str = "current"

    def __post_init__(self):
        check_recipe("Fp8RaggedDot", self.recipe)

    def __call__(
        self,
        lhs,
        rhs,
        group_sizes,
        precision=None,
        preferred_element_type=None,
        group_offset=None,
    ) -> jax.Array:
        """Return the product; the arguments are the arguments of `jax_tcgemm.ragged_dot`."""
        op = "Fp8RaggedDot"
        lhs, rhs = as_floating(op, "lhs", lhs), as_floating(op, "rhs", rhs)
        for name, x, rank in (("lhs", lhs, 2), ("rhs", rhs, 3)):
            if x.ndim != rank:
                raise ValueError(
                    f"{op}: {name} must have {rank} dimensions, got {name}.shape={x.shape}; "
                    "reshape it"
                )
        dtype = canonical_element_type(op, preferred_element_type)
        dtype = promoted_dtype(op, lhs, rhs) if dtype is None else dtype
        how = How(canonical_precision(op, precision), dtype, (lhs.dtype, rhs.dtype))
        groups = checked_groups(op, group_sizes, group_offset)
        return _product(self.recipe, how, lhs, rhs, groups)


def check_recipe(op: str, recipe) -> None:
    """Raise ValueError for a recipe that grouped products do not have."""
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise ValueError(
            f"{op}: recipe must be {' or '.join(RECIPES)}, got recipe={recipe!r}; see "
            "jax_tcgemm.quantize for other scales"
        )


def checked_groups(op: str, group_sizes, group_offset):
    """Check the sizes of groups and their offset, which may be None."""
    sizes = as_sizes(op, group_sizes)
    if sizes.ndim != 1:
        raise ShapeError(
            f"{op}: group_sizes must have one dimension, got group_sizes.shape={sizes.shape}; "
            "pass one size for each group"
        )
    return sizes, None if group_offset is None else as_offset(op, group_offset)


def of_groups(x, groups, number: int) -> jax.Array:
    """Set rows outside the `number` groups from the offset on to zero.

    The values of these rows then affect neither a per-tensor scale nor block scales along tokens,
    whose blocks cross the ends of groups.
    """
    sizes, offset = groups
    ends = jnp.pad(ends_of_groups(sizes, len(x)), (1, 0))
    first = jnp.zeros((), jnp.int32) if offset is None else offset[0]
    begin, end = (ends[jnp.clip(i, 0, len(sizes))] for i in (first, first + number))
    row = lax.iota(jnp.int32, len(x))
    return jnp.where(((begin <= row) & (row < end))[:, None], x, 0)


def gradient_of_matrices(lhs, columns, *, groups, number: int, precision, dtype) -> jax.Array:
    """Gradient of the matrices of `number` groups, from operands whose last dimension is tokens."""
    sizes, offset = groups
    out = ragged_dot_general(
        lhs,
        columns,
        sizes,
        ragged_dot_dimension_numbers=_OVER_TOKENS,
        group_offset=offset,
        precision=precision,
        preferred_element_type=dtype,
    )
    # The result has all groups from the offset on; only the first `number` have matrices.
    return out[:number]


def _arguments(how: How, groups, dtype) -> dict:
    """Keyword arguments of a grouped product."""
    sizes, offset = groups
    own = {"precision": how.precision, "preferred_element_type": dtype}
    return {"group_sizes": sizes, "group_offset": offset, **own}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(recipe: str, how: How, lhs, rhs, groups) -> jax.Array:
    return _forward(recipe, how, lhs, rhs, groups)[0]


def _forward(recipe: str, how: How, lhs, rhs, groups):
    of_rows, of_matrices = RECIPES[recipe]
    lhs = of_groups(lhs, groups, len(rhs))
    lhs, lhs_transposed = quantize(lhs, **of_rows, with_transpose=True)
    rhs, rhs_transposed = quantize(rhs, **of_matrices, with_transpose=True)
    # Kernels read matrices with rows of the contracted dimension: here the transposed matrix.
    out = ragged_dot(lhs, rhs_transposed.mT, **_arguments(how, groups, how.dtype))
    return out, (*checkpoint_name((lhs_transposed, rhs), "fp8_operands"), groups)


def _backward(recipe: str, how: How, kept, cotangent):
    lhs_transposed, rhs, groups = kept
    of_rows, _ = RECIPES[recipe]
    cotangent = of_groups(cotangent, groups, rhs.shape[0])
    rows, columns = quantize(cotangent, **of_rows, with_transpose=True)
    lhs_bar = ragged_dot(rows, rhs.mT, **_arguments(how, groups, how.operands[0]))
    own = {"groups": groups, "number": rhs.shape[0], "precision": how.precision}
    rhs_bar = gradient_of_matrices(lhs_transposed, columns, dtype=how.operands[1], **own)
    return lhs_bar, rhs_bar, (None, None)


_product.defvjp(_forward, _backward)
