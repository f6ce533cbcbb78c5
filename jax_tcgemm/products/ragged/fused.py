"""Grouped products with quantized operands, gathered rows, layers and epilogues."""

import jax.numpy as jnp
import numpy as np

from jax_tcgemm.primitives import ragged_dot as primitive
from jax_tcgemm.primitives.encodings.ragged import RaggedOperands
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


def fused_product(
    op,
    named_lhs,
    named_rhs,
    group_sizes,
    group_offset,
    bias,
    gather_indices,
    activation,
    gated,
    precision,
    preferred_element_type,
    out_sharding,
    epilogue,
    epilogue_operands,
    implementation,
    config,
    batch_invariant,
):
    """Run a grouped product; operands are (name, array[, names of sizes]), for messages."""
    (_, lhs), (_, rhs, _) = named_lhs, named_rhs
    kind = kind_of(rhs, otherwise="ragged")
    options = call_options(op, implementation, config, batch_invariant, kind)
    group_sizes = as_sizes(op, group_sizes)

    bias, gather_indices = _check_shapes(
        op, named_lhs, named_rhs, group_sizes, group_offset, bias, gather_indices, gated
    )
    offset = as_offset(op, group_offset)
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
        ragged = RaggedOperands(lhs, rhs, group_sizes, offset, gather_indices)
        found = quantized_groups.grouped(
            options, ragged, epilogue, epilogue_operands, precision=precision, **how
        )
        if found is not None:
            return found
        rhs = rhs.dequantize(lhs.dtype) if is_packed(rhs) else rhs
        lhs, rhs = quantized.as_arrays(lhs, rhs)
        precision = quantized.of_wide_numbers(op, precision)
    if rounded_dtype(epilogue) is None:
        lhs, rhs = (lhs, rhs) if layer is None else accumulating(layer.dtype, lhs, rhs)
        ragged = RaggedOperands(lhs, rhs, group_sizes, offset, gather_indices)
        return with_grouped_epilogue(
            options, ragged, epilogue, epilogue_operands, precision=precision, **how
        )
    return primitive.ragged_dot(
        lhs,
        rhs,
        group_sizes,
        offset,
        gather_indices,
        options=options,
        groups=rhs.shape[0],
        precision=canonical_precision(op, precision),
        preferred_element_type=preferred,
        out_sharding=canonical_sharding(op, out_sharding, 2),
    )


def _check_shapes(op, named_lhs, named_rhs, group_sizes, group_offset, bias, gather_indices, gated):
    """Check the shapes of a grouped product; return the bias and the indices as arrays or None."""
    (lhs_name, lhs), (rhs_name, rhs, extents) = named_lhs, named_rhs

    def check_shape(name, x, rule, holds):
        if not holds:
            raise ShapeError(
                f"{op}: {name} must have shape {rule}, got {name}.shape={x.shape} with "
                f"{lhs_name}.shape={lhs.shape} and {rhs_name}.shape={rhs.shape}; reshape it"
            )

    check_shape(lhs_name, lhs, "(m, k)", lhs.ndim == 2)
    fits = rhs.ndim == len(extents) and rhs.shape[1] == lhs.shape[1]
    check_shape(rhs_name, rhs, f"({', '.join(extents)})", fits and (not gated or rhs.shape[2] == 2))
    s = rhs.shape[0] if group_offset is None else "s"
    fits = group_sizes.ndim == 1 and s in ("s", group_sizes.shape[0])
    check_shape("group_sizes", group_sizes, f"({s},)", fits)
    if bias is not None:
        bias = as_array(op, "bias", bias)
        expected = (rhs.shape[0], *rhs.shape[2:])
        check_shape("bias", bias, expected, bias.shape == expected)
    if gather_indices is not None:
        gather_indices = as_integers(op, "gather_indices", gather_indices)
        check_shape("gather_indices", gather_indices, "(rows,)", gather_indices.ndim == 1)
    return bias, gather_indices


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
