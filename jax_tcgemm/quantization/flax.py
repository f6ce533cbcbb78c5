"""Products with state for Flax; Flax (`pip install flax`) is imported here and in qwix.py.

layer = linen.Dense(256, dot_general_cls=DelayedFp8DotGeneral)
"""

import functools

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_tcgemm.primitives.quantize import quantize
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.operands.quantized import QuantizedArray
from jax_tcgemm.quantization.fp8_dot_general import (
    How,
    as_rows,
    by_rows,
    cotangents,
    product_of_rows,
    rows_and_columns,
)

_OP = "DelayedFp8DotGeneral"


class DelayedFp8DotGeneral(fp8_ops.Fp8DotGeneralBase):
    """8-bit products with delayed scaling, like `flax.linen.fp8_ops.Fp8DirectDotGeneralOp`.

        out = q(lhs) * q(rhs),   lhs_bar = g(out_bar) * q(rhs),   rhs_bar = q(lhs) * g(out_bar)

    q and g round as in `Fp8DotGeneral`, but with one per-tensor scale per array, computed from the
    largest magnitude of the previous steps. The history and the scale of each array are variables
    of the module in the collection "_overwrite_with_gradient", with the names and shapes of Flax's.
    The gradient of such a variable is its value in the next step;
    `flax.training.train_state.TrainState` replaces the variable by its gradient.

    For the gradients, a call stores both operands only in 8 bits, transposed.
    `jax.checkpoint_policies.save_only_these_names("fp8_operands")` saves these operands under
    `jax.remat`.

    Args:
      amax_history_length: number of steps whose largest magnitudes are kept, 1024 by default.
      e4m3_dtype: dtype of operands, float8_e4m3fn by default.
      e5m2_dtype: dtype of gradients, float8_e5m2 by default.

    Raises:
      TypeError: a call raises TypeError if operands are not real floating-point arrays.
      ValueError: a call raises ValueError under the conditions of `jax_tcgemm.dot_general`.

    Numerics:
      Products follow `dot_general` of `QuantizedArray`s. Values larger than the history's largest
      magnitude are rounded to the largest 8-bit number. The cotangents of both operands are not
      rounded to 8 bits, but to the dtypes of the operands.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen
      >>> from jax_tcgemm.quantization.flax import DelayedFp8DotGeneral
      >>> layer = linen.Dense(64, dot_general_cls=DelayedFp8DotGeneral)
      >>> x = jnp.linspace(-1, 1, 8 * 32).reshape(8, 32)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> gradients = jax.grad(lambda v: layer.apply(v, x).sum())(variables)
      >>> state = gradients["_overwrite_with_gradient"]["DelayedFp8DotGeneral_0"]
      >>> float(state["input_amax_history"][0])
      1.0
    """

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
        dtypes = jnp.dtype(self.e4m3_dtype), jnp.dtype(self.e5m2_dtype)
        state = [
            (scale.value, history.value)
            for scale, history in (
                (self.input_scale, self.input_amax_history),
                (self.kernel_scale, self.kernel_amax_history),
                (self.output_grad_scale, self.output_grad_amax_history),
            )
        ]

        def run(how, lhs, rhs):
            return _product(dtypes, how, lhs, rhs, state)

        how = precision, preferred_element_type, out_sharding
        return by_rows(_OP, run, lhs, rhs, dimension_numbers, *how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(dtypes, how: How, lhs, rhs, state) -> jax.Array:
    lhs, rhs = (
        _quantized(x, dtypes[0], own)[0][0]
        for x, own in zip(map(as_rows, (lhs, rhs), how.are_columns), state, strict=False)
    )
    return product_of_rows(lhs, rhs, how, how.dtype, how.out_sharding)


def _forward(dtypes, how: How, lhs, rhs, state):
    lhs, of_lhs = _quantized(lhs, dtypes[0], state[0])
    rhs, of_rhs = _quantized(rhs, dtypes[0], state[1])
    (lhs, lhs_columns), (rhs, rhs_columns) = map(rows_and_columns, (lhs, rhs), how.are_columns)
    kept = checkpoint_name((lhs_columns, rhs_columns), "fp8_operands")
    return product_of_rows(lhs, rhs, how, how.dtype, how.out_sharding), (
        kept,
        of_lhs,
        of_rhs,
        state[2],
    )


def _backward(dtypes, how: How, kept, cotangent):
    """The gradient of state is the state after this step."""
    columns, of_lhs, of_rhs, of_gradient = kept
    gradient, of_gradient = _quantized(cotangent, dtypes[1], of_gradient)
    return (*cotangents(how, gradient, *columns), [of_lhs, of_rhs, of_gradient])


_product.defvjp(_forward, _backward)


def _quantized(x, dtype, state):
    """An array and its transpose in 8 bits, by the scale of its history, and its next state."""
    # Nothing has no largest magnitude; it counts as zeros.
    seen = x if x.size else jnp.zeros((1,), x.dtype)
    state = fp8_ops.update_fp8_meta(seen, dtype, *state)
    scale = lax.convert_element_type(state[0], jnp.float32).reshape((1,) * x.ndim)
    largest = scale * jnp.finfo(dtype).max.astype(jnp.float32)
    x = jnp.clip(x.astype(jnp.float32), -largest, largest).astype(x.dtype)
    tiles = x.shape, (*x.shape[:-2], x.shape[-1], x.shape[-2])
    made = quantize(x, scale, options=CallOptions(_OP), dtype=dtype, tiles=tiles)
    return [QuantizedArray(values, scale) for values in made], state
