"""Grouped products with quantized operands, gathered rows, layers and epilogues."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_tcgemm.primitives import ragged_dot as primitive
from jax_tcgemm.primitives.ragged_dot import RaggedOperands
from jax_tcgemm.problem.activations import canonical_activation
from jax_tcgemm.problem.layers import Layer, rounded_dtype
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products import quantized
from jax_tcgemm.products.arguments import (
    ShapeError,
    accumulating,
    as_array,
    as_integers,
    call_options,
    canonical_element_type,
    canonical_sharding,
    promoted_dtype,
)
from jax_tcgemm.products.epilogue import with_grouped_epilogue
from jax_tcgemm.products.packed import is_packed, kind_of
from jax_tcgemm.products.ragged import quantized_groups
from jax_tcgemm.products.ragged.arguments import as_offset, as_sizes


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Array arguments of a public function, as they were passed.

    Attributes:
      lhs_name: name of lhs in messages.
      lhs: array of shape (m, k).
      rhs_name: name of rhs in messages.
      rhs: array of shape `rhs_shape`.
      rhs_shape: names of rhs's dimensions, the first of which are (g, k).
      group_sizes: integers of shape (s,).
      group_offset: integer of shape () or (1,), or None.
      bias: array of shape (g, ...), or None.
      gather_indices: integers of shape (rows,), or None.
    """

    lhs_name: str
    lhs: jax.Array
    rhs_name: str
    rhs: jax.Array
    rhs_shape: tuple[str, ...]
    group_sizes: ArrayLike
    group_offset: ArrayLike | None
    bias: ArrayLike | None
    gather_indices: ArrayLike | None

    def checked(self, op: str, gated: bool) -> tuple[RaggedOperands, jax.Array | None]:
        """Return the operands of the product and the bias, as arrays of the right shapes."""
        lhs, rhs, bias, gather = self.lhs, self.rhs, self.bias, self.gather_indices

        def check_shape(name, x, rule, holds):
            if not holds:
                raise ShapeError(
                    f"{op}: {name} must have shape {rule}, got {name}.shape={x.shape} with "
                    f"{self.lhs_name}.shape={lhs.shape} and {self.rhs_name}.shape={rhs.shape}; "
                    "reshape it"
                )

        sizes = as_sizes(op, self.group_sizes)
        check_shape(self.lhs_name, lhs, "(m, k)", lhs.ndim == 2)
        fits = rhs.ndim == len(self.rhs_shape) and rhs.shape[1] == lhs.shape[1]
        fits = fits and (not gated or rhs.shape[2] == 2)
        check_shape(self.rhs_name, rhs, f"({', '.join(self.rhs_shape)})", fits)
        s = rhs.shape[0] if self.group_offset is None else "s"
        fits = sizes.ndim == 1 and s in ("s", sizes.shape[0])
        check_shape("group_sizes", sizes, f"({s},)", fits)
        if bias is not None:
            bias = as_array(op, "bias", bias)
            expected = (rhs.shape[0], *rhs.shape[2:])
            check_shape("bias", bias, expected, bias.shape == expected)
        if gather is not None:
            gather = as_integers(op, "gather_indices", gather)
            check_shape("gather_indices", gather, "(rows,)", gather.ndim == 1)
        return RaggedOperands(lhs, rhs, sizes, as_offset(op, self.group_offset), gather), bias


def fused_product(
    op: str,
    arguments: Arguments,
    *,
    gated: bool,
    activation,
    epilogue,
    epilogue_operands,
    precision,
    preferred_element_type,
    out_sharding,
    implementation,
    config,
    batch_invariant,
) -> jax.Array:
    """Check the arguments of a public function and run the grouped product."""
    kind = kind_of(arguments.rhs, otherwise="ragged")
    options = call_options(op, implementation, config, batch_invariant, kind)
    operands, bias = arguments.checked(op, gated)
    lhs, rhs = operands.lhs, operands.rhs
    preferred = canonical_element_type(op, preferred_element_type)
    if is_quantized := quantized.is_any(lhs, rhs):
        preferred = quantized.result_dtype(op, preferred, lhs, rhs)
    layer = None
    if epilogue is None:
        activation = canonical_activation(op, activation)
        dtype = promoted_dtype(op, lhs.dtype, rhs.dtype) if preferred is None else preferred
        layer, biases = _layer_of(op, dtype, activation, bias, gated)
        epilogue, epilogue_operands = layer, biases
    how = {"gated": gated, "out_sharding": out_sharding}
    if is_quantized:
        found = quantized_groups.grouped(
            options, operands, epilogue, epilogue_operands, precision=precision, **how
        )
        if found is not None:
            return found
        rhs = rhs.dequantize(lhs.dtype) if is_packed(rhs) else rhs
        lhs, rhs = quantized.as_arrays(lhs, rhs)
        precision = quantized.of_wide_numbers(op, precision)
    if rounded_dtype(epilogue) is None:
        lhs, rhs = (lhs, rhs) if layer is None else accumulating(layer.dtype, lhs, rhs)
        operands = operands._replace(lhs=lhs, rhs=rhs)
        return with_grouped_epilogue(
            options, operands, epilogue, epilogue_operands, precision=precision, **how
        )
    return primitive.ragged_dot(
        lhs,
        rhs,
        operands.group_sizes,
        operands.group_offset,
        operands.gather,
        options=options,
        groups=rhs.shape[0],
        precision=canonical_precision(op, precision),
        preferred_element_type=preferred,
        out_sharding=canonical_sharding(op, out_sharding, 2),
    )


def _layer_of(op, dtype, activation, bias, gated) -> tuple[Layer, tuple]:
    """Return a layer and its biases, which broadcast over the rows of a group."""
    if (activation != "none" or bias is not None) and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{op}: the result must be real floating point where there is an activation or a "
            f"bias, got dtype {dtype}; pass preferred_element_type"
        )
    biases = ()
    if bias is not None:
        biases = (bias[:, :1], bias[:, 1:]) if gated else (bias[:, None],)
    return Layer(np.dtype(dtype), activation, gated=gated, num_biases=len(biases)), biases
