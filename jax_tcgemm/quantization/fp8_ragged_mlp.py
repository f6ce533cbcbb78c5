"""Public `Fp8RaggedMlp`: gated feed-forward blocks of experts with 8-bit products for training."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_tcgemm.problem.activations import canonical_activation
from jax_tcgemm.problem.operands.quantized import QuantizedArray
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import as_floating, promoted_dtype
from jax_tcgemm.products.ragged.gated_ragged_linear import gated_ragged_linear
from jax_tcgemm.products.ragged.ragged_dot import ragged_dot
from jax_tcgemm.quantization.fp8_mlp import Hidden, PulledBack, quantized_weights, split_gate_up
from jax_tcgemm.quantization.fp8_ragged_dot import (
    RECIPES,
    check_recipe,
    checked_groups,
    gradient_of_matrices,
    of_groups,
)
from jax_tcgemm.quantization.quantize import quantize

_OP = "Fp8RaggedMlp"


@dataclasses.dataclass(frozen=True)
class Fp8RaggedMlp:
    """Gated feed-forward blocks of experts that multiply 8-bit floats, forward and backward.

        h   = f(q(x) * q(gate)) * (q(x) * q(up))
        out = q(h) * q(down)

    q(x) * q(gate) and the like are grouped products: the rows of each group are multiplied by the
    group's matrix, and rows of no group are 0. The six products equal the products of
    `Fp8RaggedDot` in both layers. Gate and up are one product, whose epilogue applies the
    activation. The epilogue of the product for the gradient of h applies the activation's
    derivative.

    For the gradients, a call stores the operands of both products in 8 bits, transposed, and the
    rounded gate and up. `jax.checkpoint_policies.save_only_these_names("fp8_operands")` saves only
    the 8-bit operands under `jax.remat`.

    Args:
      recipe: "current" or "block128"; see `Fp8RaggedDot`.

    Raises:
      TypeError: a call raises TypeError if operands are not real floating-point arrays, and under
        the conditions of `gated_ragged_linear` and `ragged_dot`.
      ValueError: if the recipe is unknown. A call raises ValueError if params have other names or
        shapes, and under the conditions of `gated_ragged_linear` and `ragged_dot`.

    Numerics:
      The rules of `Fp8RaggedDot` apply. The activation is computed from float32 accumulators, its
      derivative from the rounded gate and up. The cotangents of gate and up are rounded before they
      are quantized.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x, up, down = (jax.random.normal(jax.random.key(i), shape) / 16
      ...     for i, shape in enumerate([(256, 128), (4, 128, 2, 256), (4, 256, 128)]))
      >>> sizes = jnp.array([100, 0, 56, 90])
      >>> y = jax_tcgemm.Fp8RaggedMlp("block128")(x, {"up": up, "down": down}, sizes)
      >>> h = jax_tcgemm.gated_ragged_linear(x, up, sizes, "gelu")
      >>> exact = jax.lax.ragged_dot(h, down, sizes)
      >>> round(float(jnp.corrcoef(y.ravel(), exact.ravel())[0, 1]), 2)
      1.0
    """

    recipe: str = "current"

    def __post_init__(self):
        check_recipe(_OP, self.recipe)

    def __call__(
        self,
        x,
        params: Mapping[str, jax.Array],
        group_sizes,
        *,
        activation="gelu",
        precision=None,
        group_offset=None,
    ) -> jax.Array:
        """Return the result of the blocks for rows sorted by group.

        Args:
          x: array of shape (m, k).
          params: a mapping with "up" of shape (g, k, 2, j), gate and up, and "down" of shape (g, j,
            n).
          group_sizes: number of rows of each group; see `ragged_dot`.
          activation: the function f; see `gated_ragged_linear`.
          precision: precision of 8-bit products; see `ragged_dot`.
          group_offset: first group of the params; see `ragged_dot`.

        Returns:
          An array of shape (m, n), of the dtype that x and the params promote to.
        """
        if not isinstance(params, Mapping) or set(params) != {"up", "down"}:
            named = sorted(map(str, params)) if isinstance(params, Mapping) else type(params)
            raise ValueError(
                f"{_OP}: params must have up and down, got {named}; biases and ungated blocks are "
                "those of Fp8RaggedDot"
            )
        x = as_floating(_OP, "x", x)
        up, down = (as_floating(_OP, name, params[name]) for name in ("up", "down"))
        shape = (*up.shape[:1], x.shape[-1], 2, *down.shape[1:2])
        if x.ndim != 2 or down.ndim != 3 or up.shape != shape or len(down) != len(up):
            raise ValueError(
                f"{_OP}: x must have shape (m, k), up (g, k, 2, j) and down (g, j, n), got "
                f"x.shape={x.shape}, up.shape={up.shape} and down.shape={down.shape}; reshape them"
            )
        hidden = promoted_dtype(_OP, x, up)
        spec = _Spec(
            recipe=self.recipe,
            activation=canonical_activation(_OP, activation),
            precision=canonical_precision(_OP, precision),
            hidden=hidden,
            dtype=promoted_dtype(_OP, hidden, down.dtype),
            operands=(x.dtype, up.dtype, down.dtype),
        )
        return _block(spec, x, up, down, checked_groups(_OP, group_sizes, group_offset))


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Static parameters of a call.

    Attributes:
      recipe: as for `Fp8RaggedDot`.
      activation: canonical.
      precision: canonical.
      hidden: dtype of h, gate and up.
      dtype: dtype of the result.
      operands: dtypes of x, up and down, and of their cotangents.
    """

    recipe: str
    activation: str
    precision: object
    hidden: np.dtype
    dtype: np.dtype
    operands: tuple

    def run(self, product, lhs, rhs, groups, **what):
        """Run a grouped product with its epilogue or other arguments."""
        sizes, offset = groups
        return product(lhs, rhs, sizes, group_offset=offset, precision=self.precision, **what)


def _pairs(x: QuantizedArray) -> QuantizedArray:
    """Rearrange matrices (g, 2 j, k) to (g, k, 2, j)."""
    x = split_gate_up(x)
    qvalue, scale = (jnp.moveaxis(own, -1, 1) for own in (x.qvalue, x.scale))
    return QuantizedArray(qvalue, scale, None, x.qtype, (x.block[-1], *x.block[:-1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block(spec: _Spec, x, up, down, groups) -> jax.Array:
    return _forward(spec, x, up, down, groups)[0]


def _forward(spec: _Spec, x, up, down, groups):
    of_rows, of_matrices = RECIPES[spec.recipe]
    x = of_groups(x, groups, len(up))
    x, x_columns = quantize(x, **of_rows, with_transpose=True)
    (up_columns, up), (down_columns, down) = quantized_weights(up, down, of_matrices)
    function = Hidden(spec.activation, spec.hidden)
    h, *saved = spec.run(gated_ragged_linear, x, _pairs(up), groups, epilogue=function)
    h, h_columns = quantize(h, **of_rows, with_transpose=True)
    kept = checkpoint_name((x_columns, up_columns, h_columns, down_columns), "fp8_operands")
    out = spec.run(ragged_dot, h, down.mT, groups, preferred_element_type=spec.dtype)
    return out, (kept, saved, groups)


def _backward(spec: _Spec, kept, cotangent):
    (x_columns, up_columns, h_columns, down_columns), saved, groups = kept
    of_rows, _ = RECIPES[spec.recipe]
    of_x, of_up, of_down = spec.operands
    cotangent = of_groups(cotangent, groups, len(up_columns.qvalue))
    rows, columns = quantize(cotangent, **of_rows, with_transpose=True)
    function = PulledBack(spec.activation, spec.hidden, beside=False)
    what = {"epilogue": function, "epilogue_operands": saved}
    z_bar = jnp.concatenate(spec.run(ragged_dot, rows, down_columns.mT, groups, **what), -1)
    of_matrices = functools.partial(
        gradient_of_matrices, groups=groups, precision=spec.precision, number=len(up_columns.qvalue)
    )
    down_bar = of_matrices(h_columns, columns, dtype=of_down)
    rows, columns = quantize(z_bar, **of_rows, with_transpose=True)
    x_bar = spec.run(ragged_dot, rows, up_columns.mT, groups, preferred_element_type=of_x)
    up_bar = of_matrices(x_columns, columns, dtype=of_up)
    up_bar = up_bar.reshape(*up_bar.shape[:2], 2, up_bar.shape[2] // 2)
    return x_bar, up_bar, down_bar, (None, None)


_block.defvjp(_forward, _backward)
