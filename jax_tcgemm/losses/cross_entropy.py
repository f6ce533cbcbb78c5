"""Public `linear_cross_entropy` and `linear_log_prob`: losses that do not store the logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.losses import logits as lg
from jax_tcgemm.losses.arguments import (
    at_least_zero,
    canonical_axis,
    canonical_bytes,
    canonical_cap,
    canonical_index,
    check_labels,
    checked_labels,
    checked_operands,
    fraction,
    manual_axes,
)
from jax_tcgemm.losses.divisions import division_of
from jax_tcgemm.losses.how import How
from jax_tcgemm.losses.rows import token_losses
from jax_tcgemm.losses.sums import weighted_sum
from jax_tcgemm.primitives.rules import same_varying
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import (
    as_array,
    call_options,
    check_broadcasts,
    check_flag,
)

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x,
    w,
    labels,
    *,
    bias=None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    ignore_index: int | None = None,
    weights=None,
    reduction: str = "mean",
    recompute: bool = False,
    vocabulary_axis: int = 0,
    axis_name=None,
    token_axis_name=None,
    chunk_bytes: int | None = None,
    precision=None,
    implementation: str | None = None,
    batch_invariant: bool | int | None = None,
) -> jax.Array:
    """Cross-entropy of a linear layer's logits, computed in chunks above 2²² logits.

        z[..., v] = sum over k of x[..., k] * w[v, k] + bias[v]
        z = soft_cap * tanh(z / soft_cap), if there is a soft_cap
        loss[...] = lse(z) - (1 - label_smoothing) * z[..., labels] - label_smoothing * mean(z)
                    + z_loss * lse(z)**2

    lse is the logarithm of the sum of exponentials over v.

    Up to 2²² logits are stored as a whole, which takes less time, unless chunk_bytes, an
    implementation or an axis_name is given. Above, the logits are computed in chunks of tokens. A
    loss that is not differentiated takes one product. For "mean" and "sum", the loss and its
    gradients take three products in total. For the reduction "none", or with `recompute`, the
    gradients recompute the logits by vocab chunks, which takes four products; only the gradient
    itself then has the size of w. Batch-invariant calls, and calls with both soft_cap and
    label_smoothing, also take four products.

    First derivatives have this cost. Higher derivatives are correct but store arrays of the size of
    the logits. Forward mode alone (`jax.jvp`) raises TypeError, as for every `jax.custom_vjp`: use
    `jax.vjp` or `jax.grad`, to which `jax.jvp` can be applied. The function can be batched by
    `jax.vmap` and used in jit, scan, remat and `jax.shard_map`.

    Args:
      x: array of shape (..., k), of float16, bfloat16, float32 or float64.
      w: array of shape (vocabulary, k), like an embedding, or (k, vocabulary) with
        vocabulary_axis=1, like a head's kernel.
      labels: integers of shape (...), from 0 to vocabulary - 1.
      bias: None, or a floating-point array of shape (vocabulary,). Minus infinity removes an entry
        from the vocabulary, if there is no soft_cap.
      label_smoothing: fraction of the target, from 0 to 1, that is spread over the whole
        vocabulary.
      z_loss: factor of the square of lse.
      soft_cap: None, or the bound of the magnitude of logits.
      ignore_index: None, or a label whose tokens contribute nothing, whatever values x has there.
      weights: None, or a floating-point array that broadcasts to labels. The loss of each token is
        multiplied by its weight, and a mean is divided by the sum of weights.
      reduction: "mean" over the tokens that are not ignored (0 if there are none), "sum", or
        "none".
      recompute: whether to recompute the logits for the gradients of a "mean" or "sum", too. This
        takes a third more products and the least memory.
      vocabulary_axis: the vocabulary dimension of w, 0 or 1. Neither layout is copied, and the
        gradient has the layout of w.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of axes, over whose devices the
        vocabulary is sharded evenly, in order. w and bias are a device's shard; labels
        refer to the whole vocabulary. Devices exchange three numbers per token (two for a mean or
        sum).
      token_axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of axes, over whose devices
        the tokens are sharded. A mean or sum is over the tokens of all devices.
      chunk_bytes: bound on the stored logits at a time. For a loss alone, None selects 1/4 GiB. For
        gradients in three products, None selects 1 GiB, or the size of w in float32 if that is
        larger. For gradients in four products, None selects 224 MiB, or the size of x in float32 if
        that is larger. A logit counts as 2 bytes, or 4 bytes for float32 and 8 bytes for float64.
        In the forward pass, a chunk has at least one row.
      precision: precision of every product; see `matmul`.
      implementation: name of the implementation that must run every product; the call fails if the
        implementation cannot. None selects an implementation.
      batch_invariant: True, a number of tokens, False, or None; see `matmul`. The loss of each
        token is then bit-equal whatever other tokens there are, and so are the rows of the gradient
        of x for equal cotangents. Results that sum over tokens are not batch-invariant: gradients
        of w and bias, and a "mean" or "sum" and its divisor. The logits of a chunk are stored, and
        are recomputed for gradients, by vocab chunks selected for that number of tokens. On a CPU,
        a soft_cap is not batch-invariant, because XLA's loops round tanh in different ways.

    Returns:
      The loss in float32 (float64 for float64): a scalar, or an array of the shape of labels for
      "none".

    Raises:
      TypeError: if operands or labels have other dtypes.
      ValueError: if shapes do not match, numbers are out of range, a reduction or implementation is
        unknown, an axis is not a manual axis here, or operands are sharded over explicit mesh axes
        inside a `jax.shard_map` whose axes are named. Also if labels that are known at trace time
        are out of range; for other labels out of range, the loss and the gradients are NaN. Also if
        batch_invariant is set and the vocabulary is sharded, or only XLA can run a product.

    Numerics:
      - Logits accumulate as in `matmul` and are not rounded. The soft cap, exponentials and sums
        are computed in float32 (float64 for float64).
      - The operands of the gradient products are rounded once to the dtype of x and w, or to
        bfloat16 if that dtype is float16. x times a number per token is also rounded to that dtype.
      - Gradients of w and x accumulate in float32, also over chunks, and are rounded at the end.
        For a mean or sum, gradients are rounded before the multiplication by the cotangent
        (gradients of float16 stay float32 until then).
      - If logits are not stored, the label's logit is computed separately in float32. On CUDA, the
        logits of float32 operands use TF32 unless the precision is HIGHEST.
      - Exponentials are shifted by the label's logit. If a token's loss is above 60, its chunk is
        computed again with the row maximum. Stored logits are shifted by their maximum.
      - The same program gives the same bits on the same device.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x, w = jnp.ones((2, 5, 8)), jnp.zeros((100, 8))
      >>> labels = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, -100, -100]])
      >>> loss = jax_tcgemm.linear_cross_entropy(x, w, labels, ignore_index=-100)
      >>> bool(abs(loss - jnp.log(100)) < 1e-5)
      True
    """
    op = "linear_cross_entropy"
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(
            f"{op}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction=}; sum it "
            "up yourself"
        )
    call = _Call(
        *(op, x, w, labels, bias, ignore_index, axis_name, token_axis_name),
        label_smoothing=fraction(op, "label_smoothing", label_smoothing),
        z_loss=at_least_zero(op, "z_loss", z_loss),
        **{"soft_cap": soft_cap, "chunk_bytes": chunk_bytes, "precision": precision},
        **{"implementation": implementation, "vocabulary_axis": vocabulary_axis},
        batch_invariant=batch_invariant,
    )
    recompute = check_flag(op, "recompute", recompute)
    weights = call.weights(weights)
    if reduction == "none":
        (losses,) = call.token_losses(with_entropy=False)
        return losses * weights
    if reduction == "mean":
        total = call.sum_of_tokens(jnp.sum(weights))
        weights = jnp.where(total == 0, 0, weights / jnp.where(total == 0, 1, total))
    return call.weighted_sum(weights, recompute)


def linear_log_prob(
    x,
    w,
    labels,
    *,
    bias=None,
    soft_cap: float | None = None,
    ignore_index: int | None = None,
    with_entropy: bool = False,
    vocabulary_axis: int = 0,
    axis_name=None,
    chunk_bytes: int | None = None,
    precision=None,
    implementation: str | None = None,
    batch_invariant: bool | int | None = None,
):
    """Log-probabilities of given tokens from a linear layer's logits, and optionally entropies.

        z[..., v] = sum over k of x[..., k] * w[v, k] + bias[v]
        log_prob[...] = z[..., labels] - lse(z)
        entropy[...] = lse(z) - sum over v of softmax(z)[..., v] * z[..., v]

    A soft_cap applies as in `linear_cross_entropy`. The log-probabilities are the negated losses of
    `linear_cross_entropy`. They serve policy gradients, ratios of policies, and scores. The results
    take one product. The gradients take three more products, which recompute the logits by vocab
    chunks.

    Args:
      x: array of shape (..., k); see `linear_cross_entropy`. Divide x by the temperature.
      w: array of shape (vocabulary, k); see `linear_cross_entropy`.
      labels: the drawn tokens, integers of shape (...); see `linear_cross_entropy`.
      bias: None, or an array of shape (vocabulary,); see `linear_cross_entropy`.
      soft_cap: None, or the bound of the magnitude of logits; see `linear_cross_entropy`.
      ignore_index: None, or a label whose tokens have results of 0.
      with_entropy: whether to return the entropies, too.
      vocabulary_axis: the vocabulary dimension of w; see `linear_cross_entropy`.
      axis_name: mesh axes over which the vocabulary is sharded; see `linear_cross_entropy`.
      chunk_bytes: bound on the stored logits at a time; see `linear_cross_entropy`.
      precision: precision of every product; see `linear_cross_entropy`.
      implementation: name of an implementation; see `linear_cross_entropy`.
      batch_invariant: whether results, including entropies, are batch-invariant; see
        `linear_cross_entropy`.

    Returns:
      The log-probabilities, of the shape of labels, in float32 (float64 for float64). With
      with_entropy, a pair of the log-probabilities and the entropies.

    Raises:
      TypeError: under the conditions of `linear_cross_entropy`.
      ValueError: under the conditions of `linear_cross_entropy`.

    Numerics:
      The rules of `linear_cross_entropy` apply. Both results are differentiable in reverse mode.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x, w = jnp.ones((2, 8)), jnp.zeros((100, 8))
      >>> log_prob, entropy = jax_tcgemm.linear_log_prob(x, w, jnp.array([3, 1]), with_entropy=True)
      >>> bool(abs(log_prob[0] + jnp.log(100)) < 1e-5), bool(abs(entropy[0] - jnp.log(100)) < 1e-5)
      (True, True)
    """
    op = "linear_log_prob"
    call = _Call(
        *(op, x, w, labels, bias, ignore_index, axis_name, None),
        **{"label_smoothing": 0.0, "z_loss": 0.0},
        **{"soft_cap": soft_cap, "chunk_bytes": chunk_bytes, "precision": precision},
        **{"implementation": implementation, "vocabulary_axis": vocabulary_axis},
        batch_invariant=batch_invariant,
    )
    losses, *entropies = call.token_losses(check_flag(op, "with_entropy", with_entropy))
    return (-losses, *entropies) if entropies else -losses


class _Call:
    """Checked arguments of a call.

    Ignored tokens get features of zero and label 0, and are False in `kept`.
    """

    def __init__(self, op, x, w, labels, bias, ignore_index, axis_name, token_axis_name, **how):
        axis = canonical_axis(op, how["vocabulary_axis"])
        x, w, bias = checked_operands(op, x, w, bias, axis)
        labels = checked_labels(op, labels, x.shape[:-1])
        ignore_index = canonical_index(op, ignore_index)
        axes = manual_axes(op, "axis_name", axis_name)
        self.token_axes = manual_axes(op, "token_axis_name", token_axis_name)
        if shared := set(axes) & set(self.token_axes):
            raise ValueError(
                f"{op}: token_axis_name must not be among the axes that divide the vocabulary, got "
                f"{token_axis_name=} and {axis_name=}; leave out {sorted(shared)}"
            )
        asked = how.pop("implementation"), None, how.pop("batch_invariant")
        how |= {
            "soft_cap": canonical_cap(op, how["soft_cap"]),
            "chunk_bytes": canonical_bytes(op, how["chunk_bytes"]),
            "precision": canonical_precision(op, how["precision"]),
        }
        self.how = How(call_options(op, *asked), axis_name=axes or None, **how)
        check_labels(op, labels, self.how.size(w) * self.how.devices, ignore_index)
        self.division = division_of(op, x, w, labels, bias, axis, (*axes, *self.token_axes))
        divides = axes or (self.division is not None and self.division.vocabulary)
        if self.how.rows and divides:
            raise ValueError(
                f"{op}: batch_invariant must be False where devices share the vocabulary, got axes "
                f"{', '.join(divides)}; the order of their sums depends on how many tokens there "
                "are; divide tokens"
            )
        if self.division is not None:
            x, w, bias, labels = self.division.moved(x, w, bias, labels)
        self.kept = None
        if ignore_index is not None:
            self.kept = labels != ignore_index
            x, labels = jnp.where(self.kept[..., None], x, 0), jnp.where(self.kept, labels, 0)
        self.operands = x, w, bias, labels

    def weights(self, weights) -> jax.Array:
        """Weights of the tokens, of the shape of the labels; 0 for ignored tokens."""
        op, dtype, shape = (
            self.how.options.function,
            wide_dtype(self.operands[0].dtype),
            self.operands[-1].shape,
        )
        if weights is None:
            weights = jnp.ones((), dtype)
        weights = as_array(op, "weights", weights)
        if not jnp.issubdtype(weights.dtype, jnp.floating):
            raise TypeError(
                f"{op}: weights must be of a real floating-point dtype, got weights.dtype="
                f"{weights.dtype}; convert them"
            )
        check_broadcasts(op, "weights", weights, shape)
        weights = jnp.broadcast_to(weights, shape).astype(dtype)
        return weights if self.kept is None else jnp.where(self.kept, weights, 0)

    def token_losses(self, with_entropy: bool) -> list[jax.Array]:
        """Return `rows.token_losses` over all devices' vocabularies, 0 where ignored."""

        def own(how, token_axes, *operands):
            labels = operands[-1]
            losses, _, *entropies = token_losses(
                how, with_entropy, *_rows(how, token_axes, operands)
            )
            return [how.total(f).reshape(labels.shape) for f in (losses, *entropies)]

        found = self._divided(own, self.operands, is_sum=False)
        return [f if self.kept is None else jnp.where(self.kept, f, 0) for f in found]

    def weighted_sum(self, scales, recompute: bool) -> jax.Array:
        """Return `sums.weighted_sum` over all devices' vocabularies and tokens."""

        def own(how, token_axes, *operands):
            out = weighted_sum(how, recompute, *_rows(how, token_axes, operands))
            axes = (*(how.axis_name or ()), *token_axes)
            return lax.psum(out, axes) if axes else out

        return self._divided(own, (*self.operands, scales), is_sum=True)

    def sum_of_tokens(self, x) -> jax.Array:
        """Sum over the axes that shard the tokens."""
        if not self.token_axes:
            return x
        return lax.psum(*same_varying(x, over=self.token_axes), self.token_axes)

    def _divided(self, own, operands, *, is_sum: bool):
        """Run a function of the operands, on each device's shards over explicit mesh axes."""
        if self.division is None:
            return own(self.how, self.token_axes, *operands)
        how = dataclasses.replace(self.how, axis_name=self.division.vocabulary or None)
        own = functools.partial(own, how, self.division.token_axes)
        return self.division.run(own, operands, is_sum=is_sum)


def _rows(how: How, token_axes, operands):
    """Operands with tokens in one dimension, all varying over the same manual axes."""
    x, w, bias, *rest = operands
    rows = [lg.rows(x), *(a.reshape(-1) for a in rest)]
    present = [rows[0], w, *([] if bias is None else [bias]), *rows[1:]]
    x, w, *rest = same_varying(*present, over=(*(how.axis_name or ()), *token_axes))
    return (x, w, None, *rest) if bias is None else (x, w, *rest)
