"""Public `linear` and `gated_linear`: products with the epilogue of a layer."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.problem.activations import canonical_activation
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.layers import Layer
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products import quantized
from jax_tcgemm.products.arguments import (
    accumulating,
    as_array,
    call_options,
    canonical_element_type,
    canonical_sharding,
    check_addend,
    check_flag,
    real_number,
)
from jax_tcgemm.products.epilogue import check_epilogue
from jax_tcgemm.products.packed import kind_of
from jax_tcgemm.products.quantized import as_operand, as_weight, with_epilogue
from jax_tcgemm.sharding import shardings


def linear(
    x,
    w,
    bias=None,
    *,
    activation=None,
    residual=None,
    alpha: float = 1.0,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    donate_residual: bool = False,
    epilogue: Callable | None = None,
    epilogue_operands: Sequence = (),
    implementation: str | None = None,
    config: str | None = None,
    batch_invariant: bool | int | None = None,
):
    """Linear layer with bias, activation and residual, fused into one kernel where possible.

        out[..., n] = f(alpha * sum over k of x[..., k] * w[k, n] + bias) + residual

    `linear` can be differentiated any number of times, batched by `jax.vmap`, and used in jit, scan
    and remat. First derivatives consist of plain products with the activation's derivative between
    them, for which the layer stores the pre-activation. `mlp` fuses the activation's derivative,
    too. If no implementation supports the whole layer, a product runs, XLA computes the rest, and
    `jax_tcgemm.explain` reports the reason.

    Args:
      x: array of shape (..., k) with at least one dimension, or a `QuantizedArray`.
      w: array of shape (k, ...), usually (k, n), a `QuantizedArray` or a `PackedWeight`.
      bias: None, or an array that broadcasts to the result. Shape (n,) gives one value per column,
        shape (m, 1) gives one value per row.
      activation: None, "relu", "relu2" (the square of relu), "gelu" (or "gelu_tanh"), "gelu_erf",
        "silu", "sigmoid", "tanh", "leaky_relu" (slope 0.01), or the function of that name in
        jax.nn.
      residual: None, or an array that broadcasts to the result. A residual of the result's shape is
        not copied.
      alpha: a number.
      precision: None (uses `jax.default_matmul_precision`), a `lax.Precision` or its name, a pair
        of these, or a `lax.DotAlgorithmPreset` or its name; see `matmul`.
      preferred_element_type: dtype of the result. None selects the dtype that `x` and `w` promote
        to. For quantized operands, the dtypes of the scales count. With a packed weight, None
        selects the dtype of `x`.
      out_sharding: sharding of the result, for meshes with explicit axes. If a contracted dimension
        is sharded, the product is summed over devices as `out_sharding` specifies, and bias,
        activation and residual are applied after the sum.
      donate_residual: whether the result may reuse the residual's memory. XLA copies the residual
        first if the residual is needed afterwards, or is an argument that the caller does not
        donate.
      epilogue: None, or a function of the product that JAX can trace, in place of bias, activation,
        residual and alpha; see `matmul`.
      epilogue_operands: arrays that the epilogue receives after the product; see `matmul`.
      implementation: name of the implementation that must run the layer as one call
        (`jax_tcgemm.info()` lists the names); the call fails if the implementation cannot. None
        selects an implementation. Derivatives inherit the implementation.
      config: name of a config of that implementation. None selects a config. Derivatives do not
        inherit the config.
      batch_invariant: True makes the bits of a row of the result depend on that row of x and on w
        alone; see `matmul`.

    Returns:
      The result, of shape x.shape[:-1] + w.shape[1:]. With an epilogue, the results of the
      epilogue.

    Raises:
      TypeError: if operands are not numeric arrays, dtypes do not promote, an activation is given
        for a result that is not real floating point, or the epilogue is not a function or returns
        something other than arrays.
      ValueError: if shapes do not match, an activation, implementation or config is unknown, or an
        epilogue is combined with an argument that it replaces. Also, at lowering, if the named
        implementation cannot run the layer; the message says which rule was violated.

    Numerics:
      - The product accumulates as in `matmul`, also for quantized operands.
      - Bias, activation and residual are computed in float32 (float64 for float64). The result is
        rounded once.
      - Where a layer falls back to XLA on a GPU (`explain` reports this), XLA computes
        ``activation(alpha * (x @ w) + bias) + residual`` in the result's dtype and may round after
        each operation.
      - The pre-activation that is stored for derivatives has the result's dtype.
      - Where cuBLASLt runs the layer, gelu has an absolute error of about 5e-4. If rows are not
        16-byte aligned, the product may be rounded before the bias is added.
      - The same program gives the same bits on the same device.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x, w = jnp.ones((2, 5, 8)), jnp.ones((8, 16))
      >>> bias, skip = jnp.zeros(16), jnp.ones((2, 5, 16))
      >>> y = jax_tcgemm.linear(x, w, bias, activation="relu", residual=skip)
      >>> y.shape, float(y[0, 0, 0])
      ((2, 5, 16), 9.0)
    """
    op = "linear"
    x, w = as_operand(op, "x", x), as_weight(op, "w", w)
    kind = kind_of(w)
    options = call_options(op, implementation, config, batch_invariant, kind)
    check_weight(op, "w", x, w)
    dimension_numbers = (((x.ndim - 1,), (0,)), ((), ()))
    replaced = {
        **{"bias": bias, "activation": activation, "residual": residual, "alpha": alpha},
        "donate_residual": donate_residual,
        "preferred_element_type": preferred_element_type,
    }
    check_epilogue(op, epilogue, epilogue_operands, **replaced)
    if epilogue is not None:
        return with_epilogue(
            options,
            x,
            w,
            epilogue,
            epilogue_operands,
            dimension_numbers=dimension_numbers,
            precision=precision,
            out_sharding=out_sharding,
        )
    return product(
        options,
        x,
        w,
        dimension_numbers=dimension_numbers,
        bias=bias,
        activation=activation,
        residual=residual,
        alpha=alpha,
        precision=precision,
        preferred_element_type=canonical_element_type(op, preferred_element_type),
        out_sharding=out_sharding,
        donate_residual=donate_residual,
    )


def gated_linear(
    x,
    weights,
    *,
    activation="silu",
    bias=None,
    residual=None,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    donate_residual: bool = False,
    epilogue: Callable | None = None,
    epilogue_operands: Sequence = (),
    implementation: str | None = None,
    config: str | None = None,
    batch_invariant: bool | int | None = None,
):
    """Gated linear layer, such as SwiGLU: two products of one input, fused where possible.

        out[..., n] = f(sum over k of x[..., k] * gate[k, n]) * (sum over k of x[..., k] * up[k, n])

    An optional bias is added to each sum, and an optional residual is added to the result. If the
    config's kernel combines gate and up, neither product is written to memory, unless derivatives
    are needed: derivatives store both products.

    Args:
      x: array of shape (..., k), or a `QuantizedArray`.
      weights: gate and up, as one array of shape (k, 2, n), as a pair of arrays of shape (k, n), or
        as `QuantizedArray`s or `PackedWeight`s of these shapes. The forward pass copies neither
        form, except a pair with block scales along k, which is stacked first. Prefer the single
        array for parameters: its gradient and the gradient of x are one product each, whereas a
        pair needs two products each, of copies. `jnp.stack((gate, up), 1)` makes the array from a
        pair.
      activation: the function f, or None; see `linear`.
      bias: None, an array of shape (2, n), or a pair of arrays of shape (n,).
      residual: None, or an array that broadcasts to the result.
      precision: precision of both products; see `linear`.
      preferred_element_type: dtype of the result; see `linear`.
      out_sharding: sharding of the result; see `linear`.
      donate_residual: whether the result may reuse the residual's memory; see `linear`.
      epilogue: None, or a function of both products (gate first) that JAX can trace, in place of
        activation, bias and residual; see `matmul`.
      epilogue_operands: arrays that the epilogue receives after the products; see `matmul`.
      implementation: name of an implementation; see `linear`.
      config: name of a config of that implementation; see `linear`.
      batch_invariant: whether rows are batch-invariant; see `linear`.

    Returns:
      The result, of shape x.shape[:-1] + (n,). With an epilogue, the results of the epilogue.

    Raises:
      TypeError: under the conditions of `linear`.
      ValueError: under the conditions of `linear`.

    Numerics:
      Both products accumulate in float32 (float64 for float64). Everything else is computed in that
      dtype, and the result is rounded once. Other rules are the rules of `linear`.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x, weights = jnp.ones((4, 8)), jnp.ones((8, 2, 16))
      >>> y = jax_tcgemm.gated_linear(x, weights, activation="relu")
      >>> y.shape, float(y[0, 0])
      ((4, 16), 64.0)
    """
    op = "gated_linear"
    x = as_operand(op, "x", x)
    weights = gated_weights(op, "weights", x, weights, as_weight)
    kind = kind_of(*(weights if isinstance(weights, tuple) else (weights,)))
    options = call_options(op, implementation, config, batch_invariant, kind)
    rhs, rhs_up = weights if isinstance(weights, tuple) else (weights, None)
    dimension_numbers = (((x.ndim - 1,), (0,)), ((), ()))
    replaced = {
        # The default activation does not conflict with an epilogue.
        "activation": None if isinstance(activation, str) and activation == "silu" else activation,
        **{"bias": bias, "residual": residual, "donate_residual": donate_residual},
        "preferred_element_type": preferred_element_type,
    }
    check_epilogue(op, epilogue, epilogue_operands, **replaced)
    if epilogue is not None:
        return with_epilogue(
            options,
            x,
            rhs,
            epilogue,
            epilogue_operands,
            dimension_numbers=dimension_numbers,
            rhs_up=rhs_up,
            pair=x.ndim - 1 if rhs_up is None else None,
            precision=precision,
            out_sharding=out_sharding,
        )
    element_type = canonical_element_type(op, preferred_element_type)
    return product(
        options,
        x,
        rhs,
        dimension_numbers=dimension_numbers,
        rhs_up=rhs_up,
        pair=x.ndim - 1,
        bias=pair_of_biases(op, "bias", bias),
        activation=activation,
        residual=residual,
        precision=precision,
        preferred_element_type=element_type,
        out_sharding=out_sharding,
        donate_residual=donate_residual,
    )


def check_weight(op: str, name: str, x, w) -> None:
    """Raise ValueError unless the last dimension of x equals the first dimension of w."""
    if x.ndim < 1 or w.ndim < 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op}: the last dimension of x must equal the first of {name}, which must have two, "
            f"got x.shape={x.shape} and {name}.shape={w.shape}; transpose or reshape one"
        )


def gated_weights(op: str, name: str, x, weights, as_weight: Callable = as_array):
    """Check the weights of a gated layer: an array of shape (k, 2, n) or a pair of (k, n).

    `as_weight` checks one weight: `as_array`, or `products.quantized.as_weight`.
    """
    rule = f"{name} must be an array of shape (k, 2, n) or a pair of arrays of shape (k, n)"
    if isinstance(weights, Sequence) and len(weights) == 2:
        gate, up = (as_weight(op, f"{name}[{i}]", w) for i, w in enumerate(weights))
        if gate.ndim != 2 or gate.shape != up.shape or gate.dtype != up.dtype:
            raise ValueError(
                f"{op}: {rule}, got arrays of shape {gate.shape} and {up.shape} and dtype "
                f"{gate.dtype} and {up.dtype}; make them alike"
            )
        check_weight(op, f"{name}[0]", x, gate)
        return gate, up
    array = as_weight(op, name, weights)
    if array.ndim != 3 or array.shape[1] != 2:
        raise ValueError(
            f"{op}: {rule}, got {name}.shape={array.shape}; use jnp.stack((gate, up), 1)"
        )
    check_weight(op, name, x, array)
    return array


def pair_of_biases(op: str, name: str, bias) -> jax.Array | None:
    """Return the biases of a gated layer as an array of shape (2, n), or None."""
    if isinstance(bias, Sequence) and len(bias) == 2:
        own = [as_array(op, f"{name}[{i}]", b) for i, b in enumerate(bias)]
        if own[0].shape != own[1].shape:
            raise ValueError(
                f"{op}: {name} must be a pair of arrays of one shape, got {own[0].shape} and "
                f"{own[1].shape}; reshape one"
            )
        bias = jnp.stack(own)
    if bias is None:
        return None
    bias = as_array(op, name, bias)
    if bias.ndim != 2 or bias.shape[0] != 2:
        raise ValueError(
            f"{op}: {name} must have shape (2, n) or be a pair of arrays of shape (n,), got "
            f"{name}.shape={bias.shape}; use jnp.stack"
        )
    return bias


def product(
    options: CallOptions,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    dimension_numbers,
    permutation=None,
    rhs_up=None,
    pair: int | None = None,
    bias=None,
    activation=None,
    residual=None,
    alpha: float = 1.0,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    donate_residual: bool = False,
) -> jax.Array:
    """Check the epilogue of a product and bind the plainest primitive that computes both.

    Args:
      options: options of the call.
      lhs: left operand, an array or quantized array.
      rhs: right operand, an array, quantized array or packed weight.
      dimension_numbers: canonical.
      permutation: order of the result's dimensions.
      rhs_up: None, or the second right operand of a gated product.
      pair: None, or the dimension of the product that separates gate and up.
      bias: None, or an array that broadcasts to the product.
      activation: as for `linear`.
      residual: None, or an array that broadcasts to the result.
      alpha: factor of the product.
      precision: as for `linear`.
      preferred_element_type: canonical dtype of the result, or None.
      out_sharding: sharding of the result, as for `linear`.
      donate_residual: as for `linear`.
    """
    op = options.function
    name = canonical_activation(op, activation)
    alpha = real_number(op, "alpha", alpha)
    donate_residual = check_flag(op, "donate_residual", donate_residual)
    precision = canonical_precision(op, precision)
    how = {"dimension_numbers": dimension_numbers, "permutation": permutation}
    rights = (rhs,) if rhs_up is None else (rhs, rhs_up)
    is_packed = pair is not None and rhs_up is None
    types, of_product = (lhs, rhs), how
    if quantized.is_any(lhs, *rights):
        if donate_residual:
            raise ValueError(
                f"{op}: donate_residual must be False for quantized operands, got "
                f"{donate_residual=}; the result is made beside it"
            )
        dtype = quantized.result_dtype(op, preferred_element_type, lhs, *rights)
        types = [jax.ShapeDtypeStruct(x.shape, dtype) for x in types]
    else:
        ndim = plain.result_ndim(lhs.ndim, rhs.ndim, dimension_numbers)
        sharding = canonical_sharding(op, out_sharding, ndim - is_packed)
        sharding = shardings.with_dimension(sharding, pair, ndim) if is_packed else sharding
        of_product = how | {"precision": precision, "out_sharding": sharding}
        of_product |= {"preferred_element_type": preferred_element_type}
        is_plain = name == "none" and bias is None and residual is None and alpha == 1
        if is_plain and pair is None:
            return plain.dot_general(lhs, rhs, options=options, **of_product)
    z = plain.result_type(*types, options=options.selecting(), **of_product)
    shape = (*z.shape[:pair], *z.shape[pair + 1 :]) if is_packed else z.shape
    if name != "none" and not jnp.issubdtype(z.dtype, jnp.floating):
        raise TypeError(
            f"{op}: activation must be None for a result that is not real floating point, got "
            f"activation={activation!r} and a result of {z.dtype}; convert the operands"
        )
    addends = {"bias": bias, "residual": residual}
    addends = {key: as_array(op, key, x) for key, x in addends.items() if x is not None}
    for key, x in addends.items():
        is_pair = key == "bias" and pair is not None
        checked = jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if is_pair else x
        check_addend(op, key, checked, shape, z.dtype)
    layer = Layer(
        np.dtype(z.dtype),
        name,
        alpha,
        gated=pair is not None,
        num_biases=int("bias" in addends),
        has_residual="residual" in addends,
    )
    if not quantized.is_any(lhs, *rights):
        lhs, rhs, *up = accumulating(layer.dtype, lhs, *rights)
        rhs_up = up[0] if up else None
    return quantized.with_epilogue(
        options,
        lhs,
        rhs,
        layer,
        tuple(addends.values()),
        rhs_up=rhs_up,
        pair=pair if is_packed else None,
        in_place=len(addends) - 1 if donate_residual and residual is not None else None,
        precision=precision,
        out_sharding=out_sharding,
        **how,
    )
