"""Public `Fp8Mlp`: gated feed-forward block with 8-bit products for training."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_tcgemm.problem.activations import canonical_activation
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.layers import Layer, activated, pull_back
from jax_tcgemm.problem.operands.quantized import QuantizedArray, spread_along
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import as_array, as_floating, check_addend, promoted_dtype
from jax_tcgemm.products.mlp import checked_params
from jax_tcgemm.products.quantized import with_epilogue
from jax_tcgemm.quantization.fp8_dot_general import (
    RECIPES,
    How,
    check_recipe,
    cotangents,
    product_of_rows,
)
from jax_tcgemm.quantization.over_devices import over_devices
from jax_tcgemm.quantization.quantize import quantize
from jax_tcgemm.sharding import shardings
from jax_tcgemm.sharding.partitioning import resharded

_OP = "Fp8Mlp"
_OPTIONS = CallOptions(_OP)
# Products of rows; the right operand may have a dimension that separates gate and up.
_ROWS = ((1,), (1,)), ((), ())
_PAIRS_OF_ROWS = ((1,), (2,)), ((), ())


@dataclasses.dataclass(frozen=True)
class Fp8Mlp:
    """Gated feed-forward block that multiplies 8-bit floats in the forward and backward pass.

        h   = f(q(x) q(gate)) * (q(x) q(up))
        out = q(h) q(down) + residual

    The six products equal the products of `Fp8DotGeneral` in both layers. The epilogue of the first
    product applies the activation, and the epilogue of the product for the gradient of h applies
    the activation's derivative. The only other pass over the hidden layer is quantization.

    For the gradients, a call stores the operands of both products in 8 bits, transposed, and the
    rounded gate and up. `jax.checkpoint_policies.save_only_these_names("fp8_operands")` saves only
    the 8-bit operands under `jax.remat`.

    Args:
      recipe: "current" or "block128"; see `Fp8DotGeneral`.
      grad_dtype: dtype of quantized gradients; see `Fp8DotGeneral`.

    Raises:
      TypeError: under the conditions of `Fp8DotGeneral`. A call raises TypeError under the
        conditions of `mlp`, and if operands are not real floating-point arrays.
      ValueError: under the conditions of `Fp8DotGeneral`. A call raises ValueError under the
        conditions of `mlp`, if weights are not gated or are a pair, and if biases are given.

    Numerics:
      The rules of `Fp8DotGeneral` apply. The activation is computed from float32 accumulators, its
      derivative from the rounded gate and up. The cotangents of gate and up are rounded before they
      are quantized.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x, up, down = (jax.random.normal(jax.random.key(i), shape) / 16
      ...     for i, shape in enumerate([(64, 256), (256, 2, 128), (128, 256)]))
      >>> params = {"up": up, "down": down}
      >>> y = jax_tcgemm.Fp8Mlp("block128")(x, params, activation="silu", residual=x)
      >>> exact = jax_tcgemm.mlp(x, params, activation="silu", residual=x)
      >>> round(float(jnp.corrcoef(y.ravel(), exact.ravel())[0, 1]), 2)
      1.0
    """

    recipe: str = "current"
    grad_dtype: object = jnp.float8_e5m2

    def __post_init__(self):
        check_recipe(_OP, self)

    def __call__(
        self,
        x,
        params: Mapping[str, jax.Array],
        *,
        activation="gelu",
        residual=None,
        precision=None,
    ) -> jax.Array:
        """Return the block's result; see `jax_tcgemm.mlp`. Gated weights must be one array."""
        x = as_floating(_OP, "x", x)
        given = checked_params(_OP, x, params)
        up, down = given.pop("up"), given.pop("down")
        if given or isinstance(up, tuple) or up.ndim != 3:
            shape = "a pair" if isinstance(up, tuple) else f"shape {up.shape}"
            raise ValueError(
                f"{_OP}: params must have up of shape (k, 2, j), down, and no biases, got up of "
                f"{shape} and {sorted(map(str, params))}; use jax_tcgemm.mlp, or Fp8DotGeneral"
            )
        up, down = as_floating(_OP, "up", up), as_floating(_OP, "down", down)
        hidden = promoted_dtype(_OP, x, up)
        dtype = promoted_dtype(_OP, hidden, down.dtype)
        shape = *x.shape[:-1], down.shape[1]
        if residual is not None:
            residual = as_array(_OP, "residual", residual)
            check_addend(_OP, "residual", residual, shape, dtype)
            residual = _rows(jnp.broadcast_to(residual, shape))
        x = _rows(x)
        # Gate and up are quantized as one.
        up = resharded(up, shardings.whole(up, (1, 2)))
        given = x, up, down, residual
        spec = _Spec(
            recipe=self.recipe,
            grad_dtype=self.grad_dtype,
            activation=canonical_activation(_OP, activation),
            precision=canonical_precision(_OP, precision),
            hidden=hidden,
            dtype=dtype,
            operands=tuple(None if a is None else a.dtype for a in given),
            shardings=tuple(None if a is None else shardings.explicit(a) for a in given),
        )
        return _block(spec, *given).reshape(shape)


def _rows(x) -> jax.Array:
    """Merge all dimensions but the last."""
    x = resharded(x, shardings.whole(x, range(1, x.ndim - 1)))
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Static parameters of a block.

    Attributes:
      recipe: as for `Fp8DotGeneral`.
      grad_dtype: as for `Fp8DotGeneral`.
      activation: canonical.
      precision: canonical.
      hidden: dtype of h, gate and up.
      dtype: dtype of the result.
      operands: dtypes of x, up, down and the residual, if any, and of their cotangents.
      shardings: shardings of the same arrays over explicit mesh axes.
    """

    recipe: str
    grad_dtype: np.dtype
    activation: str
    precision: object
    hidden: np.dtype
    dtype: np.dtype
    operands: tuple
    shardings: tuple

    def run(self, lhs, rhs, epilogue, operands=(), *, pair=None):
        """Run a product of rows and its epilogue; `pair` is the dimension of gate and up."""
        numbers = _ROWS if pair is None else _PAIRS_OF_ROWS
        how = {"dimension_numbers": numbers, "pair": pair, "precision": self.precision}
        gates = () if pair is None else ("pair",)

        def product(lhs, rhs, out_sharding):
            out = shardings.without(out_sharding, pair)
            return with_epilogue(_OPTIONS, lhs, rhs, epilogue, operands, out_sharding=out, **how)

        names = ("m", "k"), (*gates, "n", "k"), ("m", *gates, "n")
        return over_devices(product, lhs, rhs, names, follows=True)


@dataclasses.dataclass(frozen=True)
class Hidden:
    """The epilogue that returns the hidden layer, gate and up."""

    activation: str
    dtype: np.dtype

    def __call__(self, gate, up):
        """Apply the epilogue to the accumulators of gate and up."""
        return [x.astype(self.dtype) for x in (activated(self.activation, (gate, up)), gate, up)]


@dataclasses.dataclass(frozen=True)
class PulledBack:
    """The epilogue that returns the cotangents of gate and up, stacked if `beside`."""

    activation: str
    dtype: np.dtype
    beside: bool = True

    def __call__(self, g, gate, up):
        """Apply the epilogue to the cotangent of h, and gate and up as rounded by `Hidden`."""
        saved = [x.astype(g.dtype) for x in (gate, up)]
        both = [x.astype(self.dtype) for x in pull_back(self.activation, saved, g)]
        return jnp.stack(both, -2) if self.beside else both


def quantized_weights(up, down, how: dict):
    """Quantize weights (..., k, 2, j), with gate and up as one, and (..., j, n).

    Each weight is returned as stored and transposed. `quantize` transposes to rows of k in the same
    pass.
    """
    both = up.reshape(*up.shape[:-2], 2 * up.shape[-1])
    return [quantize(w, **how, with_transpose=True) for w in (both, down)]


def split_gate_up(x: QuantizedArray) -> QuantizedArray:
    """Reshape weights (..., 2 j, k) to (..., 2, j, k)."""
    (*stack, rows, k), (*_, block_rows, depth), scale = x.shape, x.tile, x.scale
    *stacked, number, of_depth = scale.shape
    if number > 1 and (rows // 2) % block_rows != 0:
        # A block has rows of both gate and up.
        scale, block_rows, number = spread_along(scale.ndim - 2, scale, rows, block_rows), 1, rows
    if number == 1:
        block_rows = max(rows // 2, 1)
    blocks = (1, 1) if number == 1 else (2, number // 2)
    scale = scale.reshape(*stacked, *blocks, of_depth)
    block = (1, block_rows, max(depth, 1))
    return QuantizedArray(x.qvalue.reshape(*stack, 2, rows // 2, k), scale, None, x.qtype, block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block(spec: _Spec, x, up, down, residual) -> jax.Array:
    return _forward(spec, x, up, down, residual)[0]


def _forward(spec: _Spec, x, up, down, residual):
    of_rows, of_weights = RECIPES[spec.recipe]
    x, x_columns = quantize(x, **of_rows, with_transpose=True)
    (up_columns, up), (down_columns, down) = quantized_weights(up, down, of_weights)
    function = Hidden(spec.activation, spec.hidden)
    h, *saved = spec.run(x, split_gate_up(up), function, pair=1)
    h, h_columns = quantize(h, **of_rows, with_transpose=True)
    kept = checkpoint_name((x_columns, up_columns, h_columns, down_columns), "fp8_operands")
    residuals = () if residual is None else (residual,)
    last = Layer(np.dtype(spec.dtype), has_residual=bool(residuals))
    return spec.run(h, down, last, residuals), (kept, saved)


def _backward(spec: _Spec, kept, cotangent):
    (x_columns, up_columns, h_columns, down_columns), saved = kept
    of_rows, _ = RECIPES[spec.recipe]
    of_gradients = functools.partial(quantize, dtype=spec.grad_dtype, **of_rows)
    rows, columns = of_gradients(cotangent, with_transpose=True)
    function = PulledBack(spec.activation, spec.hidden)
    z_bar = spec.run(rows, down_columns, function, saved)
    of_x, of_up, of_down, of_residual = spec.operands
    x_sharding, up_sharding, down_sharding, residual_sharding = spec.shardings
    operand_shardings = x_sharding, shardings.without(up_sharding, 1)
    how = How(spec.precision, spec.dtype, (of_x, of_up), (False, True), shardings=operand_shardings)
    down_bar = product_of_rows(h_columns, columns, how, of_down, down_sharding)
    z_bar = resharded(z_bar, shardings.whole(z_bar, (1, 2)))
    z_bar = of_gradients(
        z_bar.reshape(z_bar.shape[0], math.prod(z_bar.shape[1:])), with_transpose=True
    )
    x_bar, up_bar = cotangents(how, z_bar, x_columns, up_columns)
    residual_bar = None
    if of_residual is not None:
        residual_bar = resharded(cotangent.astype(of_residual), residual_sharding)
    return x_bar, up_bar.reshape(up_bar.shape[0], 2, up_bar.shape[1] // 2), down_bar, residual_bar


_block.defvjp(_forward, _backward)
