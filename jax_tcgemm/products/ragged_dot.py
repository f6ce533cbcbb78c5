"""The public `ragged_dot`, `ragged_dot_general` and `gated_ragged_linear`: products by groups."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.primitives import dot_general as dense
from jax_tcgemm.primitives import ragged_dot as primitive
from jax_tcgemm.primitives.encodings.ragged import Factors
from jax_tcgemm.problem.activations import canonical_activation
from jax_tcgemm.problem.layers import Layer, rounded_dtype
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products import quantized, quantized_groups
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
from jax_tcgemm.products.epilogue import check_alone, with_grouped_epilogue
from jax_tcgemm.products.packed import is_packed, kind_of
from jax_tcgemm.products.quantized import as_operand, as_weight
from jax_tcgemm.products.ragged_dimensions import Dimensions
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
    """A drop-in for `jax.lax.ragged_dot`: each group of rows times a matrix of its own.

        out[i, n] = sum over k of lhs[i, k] * rhs[g, k, n]   for the rows i of group g

    and, where they are given, f(that + bias[g, n]) with an activation f, and
    lhs[gather_indices[i], k] in place of lhs[i, k]; in one kernel. Or, with a function of JAX of
    the product before that is rounded,

        out = epilogue(acc, *epilogue_operands), 0 in rows of no group

    The first `group_sizes[0]` rows of lhs are group 0, the next `group_sizes[1]` group 1, and so
    on; rows past the last group give zeros. This is the product of a mixture of experts whose
    tokens are sorted by expert. Sizes are read on the device only, so that one compiled program
    serves any: nothing is padded, no row is multiplied by a matrix that is not its own, and the
    host never waits. It can be differentiated any number of times, batched by `jax.vmap` over any
    operand, and used in jit, scan, remat and shard_map; both gradients are grouped products too,
    that of rhs one whose sums go over the rows of each group.

    Args:
      lhs: array of shape (m, k), or a `QuantizedArray`.
      rhs: array of shape (g, k, n), in any memory order that `ragged_dot_general` can say, a
        `QuantizedArray`, or a `PackedWeight` of that shape.
      group_sizes: integers of shape (s,), rows of each group, not negative. Groups end with the
        rows: what sizes say beyond m is not there. Without group_offset s must be g.
      precision: None (which takes `jax.default_matmul_precision`), a `lax.Precision` or its name, a
        pair of them, or a `lax.DotAlgorithmPreset` or its name. See Numerics.
      preferred_element_type: dtype of the result; None takes the operands', or of quantised ones
        that of their scales.
      group_offset: an integer, or an array of one: rhs[0] belongs to group `group_offset`, and rows
        of the groups before it and after those that rhs has are zero in the result. For experts
        spread over devices, each of which has some of the groups. What is outside [0, s] counts as
        the nearer end of it.
      out_sharding: sharding of the result, for meshes with explicit axes; None leaves its rows and
        columns divided as those of lhs and rhs are. Where groups or the contracted dimension are
        divided, the sum over devices leaves the result so.
      activation: None, one of `jax_tcgemm.activations.ACTIVATIONS` or the function of jax.nn of
        that name. Rows of no group stay zero.
      bias: array of shape (g, n), added to the rows of its group before the activation.
      gather_indices: integers of shape (rows,): row i of the product is that of lhs at this index,
        or zeros where lhs has no such row. Then lhs is read through them, never copied in their
        order; its gradient adds up what comes back to each row, as that of `combine_rows` does.
      epilogue: None, or a function of acc and of the operands, any that JAX can trace, which takes
        the place of activation, bias and preferred_element_type; as for `matmul`. acc is the
        product, of shape (m, n), and so is each of its results, of any dtype. Rows of no group are
        0 in acc, and in every result.
      epilogue_operands: arrays that it takes after acc, of any dtypes, or random keys. What has two
        dimensions at most broadcasts to (m, n), and it is given that as it is. What has shape
        (g, 1, n) or (g, 1, 1) is a row or a number for each group: it is given for each row that of
        its group, as an array of shape (m, n) or (m, 1), and 0 for rows of no group.
      implementation: name of an implementation (`jax_tcgemm.info()` lists them), which then runs
        the product or the call fails; None selects one, and `jax_tcgemm.explain` says which.
        Derivatives inherit it. On a GPU only "wgmma" has kernels with bias, activation, gathered
        rows and functions; where it has none, or groups have few rows for it, those are XLA's steps
        around our product.
      config: a config of that implementation; None selects one. Derivatives do not inherit it.
      batch_invariant: True has the bits of a row depend on nothing but that row and its group's
        matrix; as for `matmul`.

    Returns:
      Array of shape (m, n), or (rows, n) with gather_indices; with an epilogue, what that returns.

    Raises:
      TypeError: for operands that are not numeric arrays, sizes, an offset or indices that are not
        integers, an activation or a bias of a product that is not real floating point, and an
        epilogue that is no function or returns something else than arrays.
      ValueError: for shapes that do not fit (a TypeError, too, as of `lax.ragged_dot`), a dimension
        over 2**31 - 1, an unknown implementation or config, an epilogue together with what it
        takes the place of, with effects, or with operands or results of other shapes, or, when the
        program is lowered, an implementation that was asked for by name and cannot run the product,
        with the rule that stops it.

    Numerics:
      As `jax_tcgemm.dot_general`. A row's values reach only its own row of the result, and only
      the gradient of its own group's matrix: a NaN elsewhere does not spread. The gradient of the
      matrix of an empty group is exactly zero. The same program gives the same bits each time.
      Bias and activation are applied to the accumulator, in one rounding; derivatives of such a
      product are those of its parts, each of them rounded.
      Where only XLA's own product can run (`explain` says so) its rules hold instead.
      Quantised operands whose scales are of rows, groups and columns are multiplied as they are,
      and scaled in an epilogue; of 8 bits, by blocks of k, sums of a block are scaled before they
      are added up; others are dequantised before the product. By a `PackedWeight`
      float16 and bfloat16 are multiplied as `docs/packed-weights.md` says.
      An epilogue and its derivatives round as those of `matmul`; its plain products are grouped
      ones, and the gradient of an operand by group is the sum over the rows of each group.

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
    check_alone(op, epilogue, epilogue_operands, **replaced)
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
    return _fused(
        op,
        ("lhs", lhs),
        ("rhs", rhs, ("g", "k", "n")),
        group_sizes,
        group_offset,
        bias,
        gather_indices,
        activation,
        False,
        precision,
        preferred_element_type,
        out_sharding,
        epilogue,
        epilogue_operands,
        implementation,
        config,
        batch_invariant,
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
    """A drop-in for `jax.lax.ragged_dot_general`: `ragged_dot` over any dimensions.

    One dimension of lhs is ragged. Which kind it is of decides the form:

        free:        [b..., m..., k...], [g, b..., k..., n...] -> [b..., m..., n...]
        contracted:  [b..., m..., k...], [b..., k..., n...]    -> [g, b..., m..., n...]
        batch:       [b..., m..., k...], [b..., k..., n...]    -> [b..., m..., n...]

    The first is `ragged_dot`, the second sums over the rows of each group, which is the gradient of
    a group's matrix; the third is an ordinary `dot_general`, since no result depends on a size.

    What is read in place: lhs with its dimensions in the order above ("free", k... last) or as
    k..., m... ("contracted"), rhs with the order above or n... before k... (a group's matrices
    transposed). Other orders are transposed first. Of a contraction of 8 bits it is (m, k) and
    (n, k), as `quantize(..., with_transpose=True)` makes them of what has tokens first.

    Args:
      lhs: array with one ragged dimension, or a `QuantizedArray`.
      rhs: array, or a `QuantizedArray`; with a group dimension where the ragged dimension is free.
      group_sizes: integers of shape (s,), or with one set of sizes for each index of the dimensions
        outside the ragged one, (b..., x..., s): x are those free (or contracted) dimensions of lhs
        that come before it.
      ragged_dot_dimension_numbers: a `jax.lax.RaggedDotDimensionNumbers`.
      precision: as of `ragged_dot`.
      preferred_element_type: as of `ragged_dot`.
      group_offset: as of `ragged_dot`. Where the ragged dimension is contracted, all groups from
        there on are in the result, which has as many as there are sizes; the last are zero.
      out_sharding: as of `ragged_dot`.
      implementation: as of `ragged_dot`.
      config: as of `ragged_dot`.
      batch_invariant: as of `ragged_dot`.

    Returns:
      The result, its dimensions as above.

    Raises:
      TypeError: as `ragged_dot`.
      ValueError: as `ragged_dot`; and for dimension numbers that do not fit.

    Numerics:
      As `ragged_dot`. Quantised operands are multiplied as they are in the second form, where both
      are matrices of one 8-bit float: sums of 128 tokens leave the tensor core, times the scales of
      their blocks. Integers are multiplied as bfloat16; others are dequantised before the product.

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


def gated_ragged_linear(
    x,
    weights,
    group_sizes,
    activation="silu",
    group_offset=None,
    *,
    bias=None,
    gather_indices=None,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    epilogue: Callable | None = None,
    epilogue_operands: Sequence = (),
    implementation: str | None = None,
    config: str | None = None,
    batch_invariant: bool | int | None = None,
):
    """The first half of an expert's gated MLP, both its products and their combination in one call.

        out[i] = f(x[i] @ weights[g, :, 0] + bias[g, 0]) * (x[i] @ weights[g, :, 1] + bias[g, 1])

    for the rows i of group g, and 0 for rows of no group.

    Args:
      x: array of shape (m, k), or a `QuantizedArray`.
      weights: array of shape (g, k, 2, n): of each group the gate's and the other matrix. A reshape
        of (g, k, 2n) whose first n columns are the gate's. Or a `QuantizedArray` or a
        `PackedWeight`.
      group_sizes: as of `ragged_dot`.
      activation: f; as of `ragged_dot`.
      group_offset: as of `ragged_dot`.
      bias: None or array of shape (g, 2, n).
      gather_indices: as of `ragged_dot`.
      precision: as of `ragged_dot`.
      preferred_element_type: as of `ragged_dot`.
      out_sharding: as of `ragged_dot`.
      epilogue: None, or a function of both products, gate first, which takes the place of
        activation, bias and preferred_element_type; as of `ragged_dot`.
      epilogue_operands: arrays that it takes after the products; as of `ragged_dot`.
      implementation: as of `ragged_dot`.
      config: as of `ragged_dot`.
      batch_invariant: as of `ragged_dot`.

    Returns:
      Array of shape (m, n); with an epilogue, what that returns.

    Raises:
      TypeError: as `ragged_dot`.
      ValueError: as `ragged_dot`.

    Numerics:
      As `ragged_dot` with an activation.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> tokens, experts = jnp.ones((10, 8)), jnp.ones((3, 8, 2, 4))
      >>> jax_tcgemm.gated_ragged_linear(tokens, experts, jnp.array([4, 0, 5]), "relu")[:, 0]
      Array([64., 64., 64., 64., 64., 64., 64., 64., 64.,  0.], dtype=float32)
    """
    op = "gated_ragged_linear"
    x, weights = as_operand(op, "x", x), as_weight(op, "weights", weights, of_groups=True)
    replaced = {
        # That it has by default is not asked for.
        "activation": None if isinstance(activation, str) and activation == "silu" else activation,
        **{"bias": bias, "preferred_element_type": preferred_element_type},
    }
    check_alone(op, epilogue, epilogue_operands, **replaced)
    return _fused(
        op,
        ("x", x),
        ("weights", weights, ("g", "k", "2", "n")),
        group_sizes,
        group_offset,
        bias,
        gather_indices,
        activation,
        True,
        precision,
        preferred_element_type,
        out_sharding,
        epilogue,
        epilogue_operands,
        implementation,
        config,
        batch_invariant,
    )


def _fused(
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
    """A call that names its operands in messages as its own do: (name, array[, extents])."""
    (lhs_name, lhs), (rhs_name, rhs, extents) = named_lhs, named_rhs
    kind = kind_of(rhs, otherwise="ragged")
    options = call_options(op, implementation, config, batch_invariant, kind)
    group_sizes = as_sizes(op, group_sizes)

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
    offset = as_offset(op, group_offset)
    preferred = canonical_element_type(op, preferred_element_type)
    if is_quantized := quantized.is_any(lhs, rhs):
        preferred = quantized.result_dtype(op, preferred, lhs, rhs)
    layer = None
    if epilogue is None:
        activation = canonical_activation(op, activation)
        dtype = promoted_dtype(op, lhs.dtype, rhs.dtype) if preferred is None else preferred
        if (activation != "none" or bias is not None) and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{op}: the result must be real floating point where there is an activation or a "
                f"bias, got dtype {dtype}; pass preferred_element_type"
            )
        biases = ()
        if bias is not None:
            biases = (bias[:, :1], bias[:, 1:]) if gated else (bias[:, None],)
        layer = Layer(np.dtype(dtype), activation, gated=gated, num_biases=len(biases))
        epilogue, epilogue_operands = layer, biases
    how = {"gated": gated, "out_sharding": out_sharding}
    if is_quantized:
        factors = Factors(lhs, rhs, group_sizes, offset, gather_indices)
        found = quantized_groups.grouped(
            options, factors, epilogue, epilogue_operands, precision=precision, **how
        )
        if found is not None:
            return found
        rhs = rhs.dequantize(lhs.dtype) if is_packed(rhs) else rhs
        lhs, rhs = quantized.as_arrays(lhs, rhs)
        precision = quantized.of_wide_numbers(op, precision)
    if rounded_dtype(epilogue) is None:
        lhs, rhs = (lhs, rhs) if layer is None else accumulating(layer.dtype, lhs, rhs)
        factors = Factors(lhs, rhs, group_sizes, offset, gather_indices)
        return with_grouped_epilogue(
            options, factors, epilogue, epilogue_operands, precision=precision, **how
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


def as_sizes(op: str, x) -> jax.Array:
    """The group_sizes of a grouped product as integers, of one dimension at least."""
    x = as_integers(op, "group_sizes", x)
    if x.ndim == 0:
        raise ShapeError(
            f"{op}: group_sizes must have at least one dimension, got group_sizes.shape=(); "
            "pass one size for each group"
        )
    return x


@functools.partial(jax.jit, inline=True)
def _no_offset() -> jax.Array:
    """Zero, made on the device: an eager call would else copy one there, which may be forbidden."""
    return jnp.zeros((1,), jnp.int32)


def as_offset(op: str, group_offset) -> jax.Array:
    """The group_offset of a grouped product as an array of one integer."""
    if group_offset is None:
        return _no_offset()
    offset = as_integers(op, "group_offset", group_offset)
    if offset.size != 1:
        raise ShapeError(
            f"{op}: group_offset must be one integer, got group_offset.shape={offset.shape}; "
            "pass an array of shape (1,)"
        )
    return jnp.reshape(offset, (1,))
