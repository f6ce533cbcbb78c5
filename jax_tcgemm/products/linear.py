"""The public `linear` and `gated_linear`: products with what follows them in a layer."""

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
from jax_tcgemm.products.epilogue import check_alone
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
    """A layer: a product, a bias, an activation and a residual, in one kernel where there is one.

        out[..., n] = f(alpha * sum over k of x[..., k] * w[k, n] + bias) + residual

    It can be differentiated any number of times, batched by `jax.vmap`, and used in jit, scan and
    remat. Its first derivatives are made of plain products, with the activation's derivative
    between them; for them the layer keeps its pre-activation. `mlp` fuses that derivative, too.
    Where no implementation takes the whole layer as one call, it runs as a product and what XLA
    makes of the rest, and `jax_tcgemm.explain` says so.

    Args:
      x: array of shape (..., k), of any number of dimensions from 1 up, or a `QuantizedArray`.
      w: array of shape (k, ...), mostly (k, n), a `QuantizedArray` or a `PackedWeight`.
      bias: None, or an array that broadcasts to the result: (n,) for a number for each column,
        (m, 1) for one for each row.
      activation: None, "relu", "relu2" (the square of it), "gelu" (or "gelu_tanh"), "gelu_erf",
        "silu", "sigmoid", "tanh", "leaky_relu" (of slope 0.01), or jax.nn's function of that name.
      residual: None, or an array that broadcasts to the result; of the same shape nothing is
        copied.
      alpha: a number.
      precision: None (which takes `jax.default_matmul_precision`), a `lax.Precision` or its name, a
        pair of them, or a `lax.DotAlgorithmPreset` or its name; as for `matmul`.
      preferred_element_type: dtype of the result; None takes what the dtypes of `x` and `w`
        promote to, of quantised ones those of their scales; by a packed weight that of `x`.
      out_sharding: sharding of the result, for meshes with explicit axes. Where a contracted
        dimension is divided, the product is summed over devices as it says, and bias, activation
        and residual come after the sum.
      donate_residual: let the result take the residual's place in memory. XLA copies the residual
        first where it is needed afterwards, or is an argument that the caller does not donate.
      epilogue: None, or a function of the product, any that JAX can trace, which takes the place of
        bias, activation, residual and alpha; as for `matmul`.
      epilogue_operands: arrays that it takes after the product; as for `matmul`.
      implementation: name of an implementation (`jax_tcgemm.info()` lists them), which then runs
        the layer as one call, or the call fails; None selects one. Derivatives inherit it.
      config: a config of that implementation; None selects one. Derivatives do not inherit it.
      batch_invariant: True has the bits of a row depend on nothing but that row and w; as for
        `matmul`.

    Returns:
      The result, of shape x.shape[:-1] + w.shape[1:]; with an epilogue, what that returns.

    Raises:
      TypeError: for operands that are not numeric arrays, dtypes that do not go together, an
        activation of a result that is not real floating point, or an epilogue that is no function
        or returns something else than arrays.
      ValueError: for shapes that do not fit, an unknown activation, implementation or config, an
        epilogue together with what it takes the place of, or, when the program is lowered, an
        implementation that was asked for by name and cannot run the layer, with the rule that stops
        it.

    Numerics:
      The product accumulates as that of `matmul`, also of quantised operands. Bias, activation and
      residual are computed in float32 (float64 for float64), and only the result is rounded, once.
      Where XLA runs a layer on a GPU (`explain` says where), it is
      ``activation(alpha * (x @ w) + bias) + residual`` with the roundings that XLA gives this
      expression in the result's dtype, which may be one for each operation.
      The pre-activation that derivatives keep has the result's dtype. The same program on the same
      device gives the same bits each time. Where cuBLASLt runs the layer, gelu is accurate to about
      5e-4 absolutely, not relatively, and a bias is added to a product that may have been rounded,
      if rows do not start on 16-byte boundaries.

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
    check_alone(op, epilogue, epilogue_operands, **replaced)
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
    """A gated layer, such as SwiGLU: two products of one input, in one kernel where there is one.

        out[..., n] = f(sum over k of x[..., k] * gate[k, n]) * (sum over k of x[..., k] * up[k, n])

    with a bias inside each of the brackets where there is one, and a residual added. Neither
    product is written to memory where the config's kernel joins them itself, but for derivatives,
    which keep both.

    Args:
      x: array of shape (..., k), or a `QuantizedArray`.
      weights: gate and up: an array of shape (k, 2, n), or a pair of arrays of shape (k, n), or
        `QuantizedArray`s or `PackedWeight`s of these shapes. Forwards nothing is copied for either,
        but a pair with scales of blocks of k, which is put together first.
        The array is the better way to keep them: its gradient and that of x are one product each,
        of a pair two each, of copies. `jnp.stack((gate, up), 1)` makes the array from a pair, once.
      activation: f: None, or as for `linear`.
      bias: None, or an array of shape (2, n), or a pair of arrays of shape (n,).
      residual: None, or an array that broadcasts to the result.
      precision: as for `linear`.
      preferred_element_type: as for `linear`.
      out_sharding: as for `linear`.
      donate_residual: as for `linear`.
      epilogue: None, or a function of both products, gate first, any that JAX can trace, which
        takes the place of activation, bias and residual; as for `matmul`.
      epilogue_operands: arrays that it takes after the products; as for `matmul`.
      implementation: as for `linear`.
      config: as for `linear`.
      batch_invariant: as for `linear`.

    Returns:
      The result, of shape x.shape[:-1] + (n,); with an epilogue, what that returns.

    Raises:
      TypeError: as `linear` does.
      ValueError: as `linear` does.

    Numerics:
      As of `linear`: both products accumulate in float32 (float64 for float64), everything else is
      computed in that, and the result is rounded once.

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
        # That it has by default is not asked for.
        "activation": None if isinstance(activation, str) and activation == "silu" else activation,
        **{"bias": bias, "residual": residual, "donate_residual": donate_residual},
        "preferred_element_type": preferred_element_type,
    }
    check_alone(op, epilogue, epilogue_operands, **replaced)
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
    """Raises ValueError unless the last dimension of x is the first of w."""
    if x.ndim < 1 or w.ndim < 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op}: the last dimension of x must equal the first of {name}, which must have two, "
            f"got x.shape={x.shape} and {name}.shape={w.shape}; transpose or reshape one"
        )


def gated_weights(op: str, name: str, x, weights, as_weight: Callable = as_array):
    """The weights of a gated layer, checked: an array of shape (k, 2, n) or a pair of (k, n).

    `as_weight` says what an array is: `as_array`, or that of `products.quantized`.
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
    """The biases of a gated layer as an array of shape (2, n), or None."""
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
    """Checks what is fused to a product and binds the primitive that says no more than is asked.

    Args:
      options: options of the call.
      lhs: left operand, perhaps quantised.
      rhs: right operand, perhaps quantised.
      dimension_numbers: canonical.
      permutation: order of the result's dimensions.
      rhs_up: None, or the second right operand of a gated product.
      pair: None, or the dimension of the product that tells gate and up apart.
      bias: None, or what broadcasts to the product.
      activation: as for `linear`.
      residual: None, or what broadcasts to the result.
      alpha: factor.
      precision: as for `linear`.
      preferred_element_type: canonical dtype of the result, or None.
      out_sharding: of the result, as for `linear`.
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
                f"{op}: donate_residual must be False for quantised operands, got "
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
