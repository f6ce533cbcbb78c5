"""Public `ragged_dot` and `ragged_dot_general`: grouped products."""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from jax_tcgemm.primitives import dot_general as dense
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products import quantized
from jax_tcgemm.products.arguments import (
    call_options,
    canonical_element_type,
    canonical_sharding,
)
from jax_tcgemm.products.epilogue import check_epilogue
from jax_tcgemm.products.quantized import as_operand, as_weight
from jax_tcgemm.products.ragged import quantized_groups
from jax_tcgemm.products.ragged.arguments import as_offset, as_sizes
from jax_tcgemm.products.ragged.dimensions import Dimensions
from jax_tcgemm.products.ragged.fused import Arguments, fused_product
from jax_tcgemm.sharding.partitioning import resharded

_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)


def ragged_dot(
    lhs,
    rhs,
    group_sizes,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    out_sharding=None,
    *,
    activation=None,
    bias=None,
    gather_indices=None,
    epilogue: Callable | None = None,
    epilogue_operands: Sequence = (),
    implementation: str | None = None,
    config: str | None = None,
    batch_invariant: bool | int | None = None,
):
    """Grouped product, one matrix per group of rows: a drop-in for `jax.lax.ragged_dot`.

        out[i, n] = sum over k of lhs[i, k] * rhs[g, k, n]   for the rows i of group g

    The first `group_sizes[0]` rows of lhs are group 0, the next `group_sizes[1]` rows are group 1,
    and so on. Rows after the last group give zeros. A mixture of experts whose tokens are sorted by
    expert is such a product.

    One call can also fuse a bias and an activation, f(out + bias[g, n]), gather rows,
    lhs[gather_indices[i], k] instead of lhs[i, k], or compute any epilogue function of the
    accumulator:

        out = epilogue(acc, *epilogue_operands), 0 in rows of no group

    Group sizes are read on the device only, so one compiled program serves all group sizes. Nothing
    is padded, each row is multiplied only by the matrix of its group, and the host never waits.

    `ragged_dot` can be differentiated any number of times, batched by `jax.vmap` over any operand,
    and used in jit, scan, remat and shard_map. Both gradients are grouped products, too; the
    gradient of rhs sums over the rows of each group.

    Args:
      lhs: array of shape (m, k), or a `QuantizedArray`.
      rhs: array of shape (g, k, n), in any memory order that `ragged_dot_general` can express, or a
        `QuantizedArray` or `PackedWeight` of that shape.
      group_sizes: non-negative integers of shape (s,), the number of rows of each group. Groups are
        cut off at row m. Without group_offset, s must equal g.
      precision: None (uses `jax.default_matmul_precision`), a `lax.Precision` or its name, a pair
        of these, or a `lax.DotAlgorithmPreset` or its name; see Numerics.
      preferred_element_type: dtype of the result. None selects the dtype of the operands, or of the
        scales of quantized operands.
      group_offset: None, an integer, or an array of one integer: the group that rhs[0] belongs to.
        Rows of groups before rhs[0] and after the last matrix of rhs are zero in the result. Use
        group_offset when each device holds some of the experts. Values outside [0, s] are clamped.
      out_sharding: sharding of the result, for meshes with explicit axes. None keeps the row
        sharding of lhs and the column sharding of rhs. If groups or the contracted dimension are
        sharded, the sum over devices gives the result this sharding.
      activation: None, or an activation; see `linear`. Rows of no group stay zero.
      bias: array of shape (g, n); each row of a group adds the group's bias before the activation.
      gather_indices: None, or integers of shape (rows,). Row i of the product uses row
        gather_indices[i] of lhs, or zeros if lhs has no such row. lhs is not copied in the order of
        the indices. The gradient of lhs adds the contributions to each row, like the gradient of
        `combine_rows`.
      epilogue: None, or a function of acc and the epilogue operands that JAX can trace, in place of
        activation, bias and preferred_element_type; see `matmul`. acc is the accumulator, of shape
        (m, n). Each result of the function has that shape and any dtype. Rows of no group are 0 in
        acc and in every result.
      epilogue_operands: arrays of any dtypes, or random keys. An operand with at most two
        dimensions broadcasts to (m, n), and the function receives the operand without broadcasting.
        An operand of shape (g, 1, n) or (g, 1, 1) holds one row or one number per group. The
        function receives the value of each row's group, as an array of shape (m, n) or (m, 1), with
        0 for rows of no group.
      implementation: name of the implementation that must run the product (`jax_tcgemm.info()`
        lists the names); the call fails if the implementation cannot. None selects an
        implementation, which `jax_tcgemm.explain` reports. Derivatives inherit the implementation.
        On a GPU, only "wgmma" has kernels with bias, activation, gathered rows and epilogue
        functions. Where "wgmma" has no such kernel, or groups have too few rows, XLA computes these
        steps around the grouped product.
      config: name of a config of that implementation. None selects a config. Derivatives do not
        inherit the config.
      batch_invariant: True makes the bits of a row of the result depend on that row of lhs and the
        matrix of its group alone; see `matmul`.

    Returns:
      Array of shape (m, n), or (rows, n) with gather_indices. With an epilogue, the results of the
      epilogue.

    Raises:
      TypeError: if operands are not numeric arrays, sizes, offset or indices are not integers, an
        activation or bias is given for a product that is not real floating point, or the epilogue
        is not a function or returns something other than arrays.
      ValueError: if shapes do not match (the exception is a TypeError, too, as in
        `lax.ragged_dot`), a dimension exceeds `2**31 - 1`, or an implementation or config is
        unknown. Also if an epilogue is combined with an argument that it replaces, has effects, or
        has operands or results of other shapes. Also, at lowering, if the named implementation
        cannot run the product; the message says which rule was violated.

    Numerics:
      - Accumulators and rounding follow `dot_general`. The same program gives the same bits.
      - The values of a row reach only that row of the result and the gradient of its group's
        matrix. A NaN does not spread to other rows or groups. The gradient of the matrix of an
        empty group is exactly zero.
      - Bias and activation are applied to the accumulator, with one rounding. Derivatives are the
        derivatives of the separate steps, each rounded.
      - Where only XLA's product can run (`explain` reports this), XLA's rules apply.
      - Quantized operands with per-row, per-group and per-column scales are multiplied without
        dequantization and scaled in the epilogue. For 8-bit operands with block scales along k, the
        accumulator of each block is scaled before the blocks are added. Other quantized operands
        are dequantized before the product. With a `PackedWeight`, float16 and bfloat16 are
        multiplied as `docs/packed-weights.md` describes.
      - An epilogue and its derivatives round as in `matmul`, with grouped products in place of
        plain products. The gradient of a per-group operand is the sum over the rows of each group.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> tokens, experts = jnp.ones((10, 8)), jnp.ones((3, 8, 4))
      >>> jax_tcgemm.ragged_dot(tokens, experts, jnp.array([4, 0, 5]))[:, 0]
      Array([8., 8., 8., 8., 8., 8., 8., 8., 8., 0.], dtype=float32)
      >>> scales = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
      >>> jax_tcgemm.ragged_dot(
      ...     tokens,
      ...     experts,
      ...     jnp.array([4, 0, 5]),
      ...     epilogue=lambda acc, scale: acc * scale + 1,
      ...     epilogue_operands=(scales,),
      ... )[:, 0]
      Array([ 9.,  9.,  9.,  9., 25., 25., 25., 25., 25.,  0.], dtype=float32)
    """
    op = "ragged_dot"
    lhs, rhs = as_operand(op, "lhs", lhs), as_weight(op, "rhs", rhs, of_groups=True)
    replaced = {
        **{"activation": activation, "bias": bias},
        "preferred_element_type": preferred_element_type,
    }
    check_epilogue(op, epilogue, epilogue_operands, **replaced)
    is_plain = activation is None and bias is None and gather_indices is None and epilogue is None
    if is_plain and not quantized.is_any(lhs, rhs):
        return _ragged_dot_general(
            op,
            lhs,
            rhs,
            group_sizes,
            _ROWS,
            precision,
            preferred_element_type,
            group_offset,
            out_sharding,
            implementation,
            config,
            batch_invariant,
        )
    arrays = group_sizes, group_offset, bias, gather_indices
    return fused_product(
        op,
        Arguments("lhs", lhs, "rhs", rhs, ("g", "k", "n"), *arrays),
        gated=False,
        activation=activation,
        epilogue=epilogue,
        epilogue_operands=epilogue_operands,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
        config=config,
        batch_invariant=batch_invariant,
    )


def ragged_dot_general(
    lhs,
    rhs,
    group_sizes,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    out_sharding=None,
    *,
    implementation: str | None = None,
    config: str | None = None,
    batch_invariant: bool | int | None = None,
) -> jax.Array:
    """Grouped product over any dimensions: a drop-in for `jax.lax.ragged_dot_general`.

    One dimension of lhs is ragged. The kind of the ragged dimension determines the form:

        free:        [b..., m..., k...], [g, b..., k..., n...] -> [b..., m..., n...]
        contracted:  [b..., m..., k...], [b..., k..., n...]    -> [g, b..., m..., n...]
        batch:       [b..., m..., k...], [b..., k..., n...]    -> [b..., m..., n...]

    The first form is `ragged_dot`. The second form sums over the rows of each group; the gradient
    of a group's matrix is such a product. The third form is an ordinary `dot_general`, because no
    result depends on a group size.

    These orders are read in place: for lhs, the order above ("free", k... last) or k..., m...
    ("contracted"); for rhs, the order above, or n... before k... (each group's matrix transposed).
    Other orders are transposed first. A contraction of 8-bit operands reads (m, k) and (n, k) in
    place; `quantize(..., with_transpose=True)` makes these from arrays whose first dimension is
    tokens.

    Args:
      lhs: array with one ragged dimension, or a `QuantizedArray`.
      rhs: array or `QuantizedArray`, with a group dimension if the ragged dimension is free.
      group_sizes: integers of shape (s,). Or one set of sizes for each index of the dimensions
        outside the ragged dimension, of shape (b..., x..., s), where x are the free (or contracted)
        dimensions of lhs that precede the ragged dimension.
      ragged_dot_dimension_numbers: a `jax.lax.RaggedDotDimensionNumbers`.
      precision: precision of the product; see `ragged_dot`.
      preferred_element_type: dtype of the result; see `ragged_dot`.
      group_offset: first group of rhs; see `ragged_dot`. If the ragged dimension is contracted, the
        result starts with that group. The result has as many groups as there are sizes, and the
        last groups are zero.
      out_sharding: sharding of the result; see `ragged_dot`.
      implementation: name of an implementation; see `ragged_dot`.
      config: name of a config of that implementation; see `ragged_dot`.
      batch_invariant: whether rows are batch-invariant; see `ragged_dot`.

    Returns:
      The result, with the dimensions given above.

    Raises:
      TypeError: under the conditions of `ragged_dot`.
      ValueError: under the conditions of `ragged_dot`, and if dimension numbers do not match.

    Numerics:
      The rules of `ragged_dot` apply. In the second form, two matrices of one 8-bit float dtype are
      multiplied without dequantization: accumulators are promoted to float32 every 128 tokens and
      multiplied by the block scales. Integers are multiplied as bfloat16. Other quantized operands
      are dequantized before the product.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
      >>> x, y = jnp.ones((10, 8)), jnp.ones((10, 4))
      >>> out = jax_tcgemm.ragged_dot_general(x, y, jnp.array([4, 0, 5]), numbers)
      >>> out.shape, out[:, 0, 0]
      ((3, 8, 4), Array([4., 0., 5.], dtype=float32))
    """
    return _ragged_dot_general(
        "ragged_dot_general",
        lhs,
        rhs,
        group_sizes,
        ragged_dot_dimension_numbers,
        precision,
        preferred_element_type,
        group_offset,
        out_sharding,
        implementation,
        config,
        batch_invariant,
    )


def _ragged_dot_general(
    op,
    lhs,
    rhs,
    group_sizes,
    numbers,
    precision,
    preferred_element_type,
    group_offset,
    out_sharding,
    implementation,
    config,
    batch_invariant,
):
    lhs, rhs = as_operand(op, "lhs", lhs), as_operand(op, "rhs", rhs)
    group_sizes = as_sizes(op, group_sizes)
    dims = Dimensions(op, numbers, lhs, rhs, group_sizes, group_offset is not None)
    kind = "gemm" if dims.form == "batch" else "ragged"
    options = call_options(op, implementation, config, batch_invariant, kind)
    precision = canonical_precision(op, precision)
    preferred = canonical_element_type(op, preferred_element_type)
    sharding = canonical_sharding(op, out_sharding, dims.result_ndim)
    if quantized.is_any(lhs, rhs):
        preferred = quantized.result_dtype(op, preferred, lhs, rhs)
        if dims.form == "contraction":
            operands = lhs, rhs, group_sizes, as_offset(op, group_offset)
            own = {"dtype": preferred, "precision": precision}
            if (out := quantized_groups.contraction(options, dims, *operands, **own)) is not None:
                return resharded(out, sharding)
        lhs, rhs = quantized.as_arrays(lhs, rhs)
        precision = quantized.of_wide_numbers(op, precision)
    common = {"options": options, "precision": precision, "preferred_element_type": preferred}
    common["out_sharding"] = sharding
    if dims.form == "batch":
        numbers = numbers.dot_dimension_numbers
        return dense.dot_general(lhs, rhs, dimension_numbers=numbers, **common)
    offset = as_offset(op, group_offset)
    group_sizes = dims.scaled(group_sizes)
    run = dims.rows if dims.form == "rows" else dims.contraction
    return run(lhs, rhs, group_sizes, offset, **common)
