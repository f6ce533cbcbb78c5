"""Public `mlp`: the feed-forward block of a transformer, with a fused backward pass."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jax_tcgemm.primitives.backward import accumulating_tangent, activated_tangent
from jax_tcgemm.primitives.dot_general import dot_general
from jax_tcgemm.primitives.encodings.plain import Plain
from jax_tcgemm.primitives.epilogue_product import with_layer
from jax_tcgemm.problem.activations import canonical_activation
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.layers import Layer, broadcast_to
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
    promoted_dtype,
)
from jax_tcgemm.products.linear import check_weight, gated_weights, pair_of_biases, product
from jax_tcgemm.products.packed import kind_of
from jax_tcgemm.sharding import partitioning, shardings

_NAMES = ("up", "up_bias", "down", "down_bias")


def mlp(
    x,
    params: Mapping[str, jax.Array],
    *,
    activation="gelu",
    residual=None,
    accumulate: Mapping[str, jax.Array] | None = None,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    donate_residual: bool = False,
    implementation: str | None = None,
    batch_invariant: bool | int | None = None,
) -> jax.Array:
    """Feed-forward block of a transformer (up, activation, down), fused in both directions.

        h[..., j]   = f(sum over k of x[..., k] * up[k, j] + up_bias[j])
        out[..., n] = sum over j of h[..., j] * down[j, n] + down_bias[n] + residual[..., n]

    With gated weights, as in Llama, h = f(x gate + bias_gate) * (x up + bias_up).

    The forward pass is two calls: `linear` or `gated_linear`, then `linear`. In the backward pass,
    the epilogue of the product with `down` applies the activation's derivative and sums columns for
    the gradient of up_bias. The gradients of a block are four products, with no pass over the
    hidden layer between them. The gradient of the pre-activation reuses the memory of the
    pre-activation. XLA first copies the pre-activation if the pre-activation is needed again, or is
    a residual that one program passes to another.

    The products can also accumulate the gradients of weights in float32 over several microbatches.
    Pass buffers as `accumulate`. The "gradient" of a buffer is then the buffer's content plus the
    gradient of its weight. This gradient reuses the buffer's memory if the buffer is donated or no
    longer needed::

        def microbatch(buffers, batch):
            return jax.grad(loss, argnums=1)(params, buffers, batch), None

        buffers, _ = jax.lax.scan(microbatch, zeros, batches)

    Here, `loss` passes each buffer to one call of `mlp`. Do not differentiate with respect to the
    weights as well: every gradient would be computed twice.

    Args:
      x: array of shape (..., k), or a `QuantizedArray`.
      params: a mapping with "up" and "down", and optionally "up_bias" and "down_bias". "up" is an
        array of shape (k, j), or for a gated block an array of shape (k, 2, j) or a pair of arrays
        of shape (k, j). "down" has shape (j, n). "up_bias" has shape (j,), or for a gated block (2,
        j) or a pair. "down_bias" has shape (n,). Weights may be `QuantizedArray`s or
        `PackedWeight`s; the block is then two calls of `linear`, also for derivatives.
      activation: the function f, or None; see `linear`.
      residual: None, or an array that broadcasts to the result.
      accumulate: None, or a mapping with "up", "down" or both. The values are buffers of the shapes
        of the weights, of any floating dtype. Must be None with quantized operands.
      precision: precision of all products; see `linear`.
      preferred_element_type: dtype of the result; see `linear`. h has the dtype that x and up
        promote to.
      out_sharding: sharding of the result; see `linear`. h has the row sharding of x and the column
        sharding of up, but no mesh axis is used twice.
      donate_residual: whether the result may reuse the residual's memory; see `linear`.
      implementation: name of the implementation that must run all products; see `linear`.
      batch_invariant: whether rows of the result and of the gradient of x are batch-invariant; see
        `linear`.

    Returns:
      The result, of shape x.shape[:-1] + (n,).

    Raises:
      TypeError: under the conditions of `linear`, and if params is not a mapping.
      ValueError: under the conditions of `linear`, and if names are unknown or missing.

    Numerics:
      Each product follows the rules of `linear`. h, the pre-activation and the gradient of the
      pre-activation are rounded to the dtype of h. The gradient of up_bias is a float32 sum of the
      rounded gradient of the pre-activation. Second derivatives and forward mode consist of plain
      products.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x = jnp.ones((4, 8))
      >>> params = {"up": jnp.ones((8, 2, 16)), "down": jnp.ones((16, 8))}
      >>> block = lambda p: jax_tcgemm.mlp(x, p, activation="relu", residual=x).sum()
      >>> float(block(params)), jax.grad(block)(params)["up"].shape
      (32800.0, (8, 2, 16))
    """
    op = "mlp"
    x = quantized.as_operand(op, "x", x)
    given = checked_params(op, x, params, quantized.as_weight)
    weights = *_weights(given["up"]), given["down"]
    options = call_options(op, implementation, None, batch_invariant, kind_of(*weights))
    is_gated = isinstance(given["up"], tuple) or given["up"].ndim == 3
    spec = _Spec(
        options=options,
        activation=canonical_activation(op, activation),
        pair=x.ndim - 1 if is_gated else None,
        precision=canonical_precision(op, precision),
        preferred_element_type=canonical_element_type(op, preferred_element_type),
        out_sharding=canonical_sharding(op, out_sharding, x.ndim),
        donate_residual=check_flag(op, "donate_residual", donate_residual),
    )
    if quantized.is_any(x, *weights):
        if accumulate is not None:
            raise ValueError(
                f"{op}: accumulate must be None beside quantized operands, got accumulate of type "
                f"{type(accumulate).__name__}; quantized weights have no gradients"
            )
        return _by_layers(spec, x, given, residual)
    hidden = promoted_dtype(op, x.dtype, jax.tree.leaves(given["up"])[0].dtype)
    dtype = spec.preferred_element_type or promoted_dtype(op, hidden, given["down"].dtype)
    for name, of in (("up_bias", hidden), ("down_bias", dtype)):
        if name in given:
            check_addend(op, name, given[name], given[name].shape, of)
    if residual is not None:
        residual = as_array(op, "residual", residual)
        shape = (*x.shape[:-1], given["down"].shape[1])
        check_addend(op, "residual", residual, shape, dtype)
        given["residual"] = jnp.broadcast_to(residual, shape)
    if spec.activation != "none" and not jnp.issubdtype(hidden, jnp.floating):
        raise TypeError(
            f"{op}: activation must be None for a result that is not real floating point, got "
            f"activation={activation!r} and a hidden layer of {hidden}; convert the operands"
        )
    return _block(spec, x, given, _checked_buffers(op, accumulate, given))


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Static parameters of a block; `pair` is the dimension of Z that separates gate and up."""

    options: CallOptions
    activation: str
    pair: int | None
    precision: object
    preferred_element_type: object
    out_sharding: object
    donate_residual: bool

    @property
    def products(self) -> dict:
        """Parameters of all products."""
        return {"options": self.options, "precision": self.precision}


def _by_layers(spec: _Spec, x, given: dict, residual) -> jax.Array:
    """Run a block as two layers."""
    gate, *second = _weights(given["up"])
    h = product(
        spec.options,
        x,
        gate,
        rhs_up=second[0] if second else None,
        pair=spec.pair,
        bias=given.get("up_bias"),
        activation=spec.activation,
        dimension_numbers=_contracting_last(x),
        precision=spec.precision,
    )
    return product(
        spec.options,
        h,
        given["down"],
        bias=given.get("down_bias"),
        residual=residual,
        preferred_element_type=spec.preferred_element_type,
        out_sharding=spec.out_sharding,
        donate_residual=spec.donate_residual,
        dimension_numbers=_contracting_last(h),
        precision=spec.precision,
    )


def checked_params(op, x, params, as_weight: Callable = as_array) -> dict:
    """Check the parameters of a block and return the given ones by name.

    "up" is as `gated_weights` returns it, or a matrix.
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"{op}: params must be a mapping, got params of type {type(params).__name__}; "
            f"its names are {', '.join(_NAMES)}"
        )
    unknown = set(params) - set(_NAMES)
    missing = {"up", "down"} - set(params)
    if unknown or missing:
        raise ValueError(
            f"{op}: params must have up and down, and may have up_bias and down_bias, got "
            f"{sorted(map(str, params))}; rename or add"
        )
    up, gated = params["up"], isinstance(params["up"], tuple | list)
    up = up if gated else as_weight(op, "up", up)
    if gated or up.ndim == 3:
        up, gated = gated_weights(op, "up", x, up, as_weight), True
        num_hidden = _weights(up)[0].shape[-1]
    else:
        check_weight(op, "up", x, up)
        num_hidden = up.shape[-1]
        if up.ndim != 2:
            raise ValueError(
                f"{op}: up must have shape (k, j), or gated (k, 2, j) or a pair, got "
                f"up.shape={up.shape}; reshape it"
            )
    down = as_weight(op, "down", params["down"])
    if down.ndim != 2 or down.shape[0] != num_hidden:
        raise ValueError(
            f"{op}: down must have shape ({num_hidden}, n), for up has {num_hidden} columns, got "
            f"down.shape={down.shape}; transpose or reshape it"
        )
    given = {"up": up, "down": down}
    for name, shape in (
        ("up_bias", (2, num_hidden) if gated else (num_hidden,)),
        ("down_bias", (down.shape[1],)),
    ):
        if (bias := params.get(name)) is None:
            continue
        bias = pair_of_biases(op, name, bias) if len(shape) == 2 else as_array(op, name, bias)
        if bias.shape != shape:
            raise ValueError(
                f"{op}: {name} must have shape {shape}, got {name}.shape={bias.shape}; reshape it"
            )
        given[name] = bias
    return given


def _checked_buffers(op, accumulate, given) -> dict:
    if accumulate is None:
        return {}
    if not isinstance(accumulate, Mapping) or set(accumulate) - {"up", "down"}:
        raise ValueError(
            f"{op}: accumulate must be a mapping with up, down or both, got {accumulate!r:.200}; "
            "gradients of biases are not accumulated"
        )
    buffers = {}
    for name, buffer in accumulate.items():
        buffer = tuple(buffer) if isinstance(buffer, list) else buffer
        buffer = jax.tree.map(functools.partial(as_array, op, f"accumulate[{name!r}]"), buffer)
        got, wanted = (jax.tree.map(jnp.shape, tree) for tree in (buffer, given[name]))
        if got != wanted:
            raise ValueError(
                f"{op}: accumulate[{name!r}] must be like {name}, of shape {wanted}, got {got}; "
                "use jnp.zeros_like with a dtype"
            )
        buffers[name] = buffer
    return buffers


def _weights(up):
    return up if isinstance(up, tuple) else (up,)


def _contracting_last(x):
    return ((x.ndim - 1,), (0,)), ((), ())


def _hidden_sharding(x, up):
    """Sharding of the hidden layer: the row sharding of x and the column sharding of a weight."""
    columns = tuple(range(x.ndim, x.ndim + up.ndim - 1))
    names = tuple(range(x.ndim)), (x.ndim - 1, *columns)
    return shardings.following((x, up), names, (*names[0][:-1], *columns))


def _up(spec: _Spec, x, up, bias, *, keeps_z: bool) -> list[jax.Array]:
    """The hidden layer and, if `keeps_z`, its pre-activation."""
    gate, *second = _weights(up)
    dtype = np.dtype(jnp.promote_types(x.dtype, gate.dtype))
    biases = () if bias is None else (bias,)
    gated, num_biases = spec.pair is not None, len(biases)
    encoding = Plain.of(
        x,
        gate,
        _contracting_last(x),
        num_rhs=1 + len(second),
        pair=spec.pair if not second else None,
        precision=spec.precision,
        out_sharding=_hidden_sharding(x, gate),
    )
    layer = Layer(dtype, spec.activation, gated=gated, num_biases=num_biases, keeps_z=keeps_z)
    return with_layer(encoding, (x, gate, *second), biases, spec.options, layer)


def _down(spec: _Spec, h, down, bias, residual) -> jax.Array:
    addends = [x for x in (bias, residual) if x is not None]
    in_place = len(addends) - 1 if spec.donate_residual and residual is not None else None
    numbers, out_sharding = _contracting_last(h), spec.out_sharding
    if not addends:
        how = {"dimension_numbers": numbers, "out_sharding": out_sharding}
        dtype = spec.preferred_element_type
        return dot_general(h, down, preferred_element_type=dtype, **how, **spec.products)
    dtype = np.dtype(spec.preferred_element_type or jnp.promote_types(h.dtype, down.dtype))
    layer = Layer(dtype, num_biases=int(bias is not None), has_residual=residual is not None)
    h, down = accumulating(dtype, h, down)
    encoding = Plain.of(h, down, numbers, precision=spec.precision, out_sharding=out_sharding)
    (out,) = with_layer(encoding, (h, down), addends, spec.options, layer, in_place=in_place)
    return out


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _block(spec: _Spec, x, given: dict, buffers: dict) -> jax.Array:
    del buffers  # Only derivatives with respect to them exist.
    (h,) = _up(spec, x, given["up"], given.get("up_bias"), keeps_z=False)
    return _down(spec, h, given["down"], given.get("down_bias"), given.get("residual"))


def _block_jvp(spec: _Spec, primals, tangents):
    """The tangent of a block, written so that its transpose is made of fused products."""
    x, given, buffers = primals
    dx, dgiven, dbuffers = jax.tree.map(
        lambda t: None if isinstance(t, SymbolicZero) else t,
        tangents,
        is_leaf=lambda t: isinstance(t, SymbolicZero),
    )
    down = given["down"]
    h, z = _up(spec, x, given["up"], given.get("up_bias"), keeps_z=True)
    out = _down(spec, h, down, given.get("down_bias"), given.get("residual"))
    dz, dup_bias = _tangents_of_z(spec, primals, (dx, dgiven, dbuffers)), dgiven.get("up_bias")
    dout = []
    if dz or dup_bias is not None:
        total = functools.reduce(lax.add, dz) if dz else jnp.zeros_like(z)
        dout.append(
            activated_tangent(
                total.astype(z.dtype),
                z,
                down,
                dup_bias,
                dimension_numbers=_contracting_last(h),
                activation=spec.activation,
                gate_up_axis=spec.pair,
                bias_axes=tuple(range(h.ndim - 1, z.ndim)),
                preferred_element_type=out.dtype,
                out_sharding=spec.out_sharding,
                **spec.products,
            )
        )
    if dgiven["down"] is not None:
        dout.append(_product(spec, h, dgiven["down"], spec.out_sharding))
    if "down" in buffers and dbuffers["down"] is not None:
        buffer = dbuffers["down"], buffers["down"]
        dout.append(_accumulating(spec, h, *buffer, spec.out_sharding))
    if dgiven.get("down_bias") is not None:
        bias = dgiven["down_bias"].astype(wide_dtype(out.dtype))
        dout.append(broadcast_to(bias, out))
    if dgiven.get("residual") is not None:
        dout.append(partitioning.resharded(dgiven["residual"], jax.typeof(out).sharding))
    dout = [t.astype(out.dtype) for t in dout]
    return out, functools.reduce(lax.add, dout) if dout else jnp.zeros_like(out)


def _tangents_of_z(spec: _Spec, primals, tangents) -> list[jax.Array]:
    """Addends of the tangent of Z, without the tangent of the bias."""
    (x, given, buffers), (dx, dgiven, dbuffers) = primals, tangents
    up, found = given["up"], []
    hidden = _hidden_sharding(x, _weights(up)[0])

    def add(f, *ws):
        """Append f(w) of one weight, or the stacked f(w) of a pair of weights."""
        parts = [f(*each) for each in zip(*map(_weights, ws), strict=True)]
        found.append(parts[0] if len(parts) == 1 else jnp.stack(parts, spec.pair))

    if dx is not None:
        add(lambda w: _product(spec, dx, w, hidden), up)
    if (dup := _instantiated(dgiven["up"], up)) is not None:
        add(lambda dw: _product(spec, x, dw, hidden), dup)
    if "up" in buffers and (d := _instantiated(dbuffers["up"], buffers["up"])) is not None:
        add(lambda dw, buffer: _accumulating(spec, x, dw, buffer, hidden), d, buffers["up"])
    return found


def _product(spec: _Spec, a, b, out_sharding):
    numbers = _contracting_last(a)
    return dot_general(a, b, dimension_numbers=numbers, out_sharding=out_sharding, **spec.products)


def _accumulating(spec: _Spec, a, tangent, buffer, out_sharding):
    """Product of `a` and a weight's tangent; its transpose adds to the content of the buffer."""
    return accumulating_tangent(
        tangent,
        a,
        buffer,
        dimension_numbers=_contracting_last(a),
        preferred_element_type=None,
        out_sharding=out_sharding,
        **spec.products,
    )


def _instantiated(tangent, primal):
    """Tangent of a weight or pair, with zeros for one that is None; None if all are None."""
    if all(t is None for t in _weights(tangent)):
        return None
    if not isinstance(tangent, tuple):
        return tangent
    return tuple(
        jnp.zeros_like(p) if t is None else t for t, p in zip(tangent, primal, strict=True)
    )


_block.defjvp(_block_jvp, symbolic_zeros=True)
