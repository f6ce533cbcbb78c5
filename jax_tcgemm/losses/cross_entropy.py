"""The public `linear_cross_entropy` and `linear_log_prob`: losses over logits that are not kept."""

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
from jax_tcgemm.losses.logits import How
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
    """The cross-entropy of a linear layer's logits, computed in chunks where there are many.

        z[..., v] = sum over k of x[..., k] * w[v, k] + bias[v]
        z = soft_cap * tanh(z / soft_cap), if there is a soft_cap
        loss[...] = lse(z) - (1 - label_smoothing) * z[..., labels] - label_smoothing * mean(z)
                    + z_loss * lse(z)**2

    where lse is the logarithm of the sum of exponentials over v. Up to 2**22 logits are stored,
    where neither chunk_bytes, an implementation nor an axis_name is given: that takes less time.
    Of more, tokens are taken in chunks. Of a "mean" or "sum" the gradients are made beside the
    loss, in three products all told; a loss that is not differentiated takes one. With the
    reduction "none", or `recompute`, the gradients make the logits again, in four products, by
    chunks of the vocabulary, and nothing has the size of w but the gradient itself. It can be
    differentiated once for that; further derivatives are right, too, but keep what has the size of
    the logits. Forward mode alone (`jax.jvp`) is a TypeError, as of every `jax.custom_vjp`: use
    `jax.vjp` or `jax.grad`, of which `jax.jvp` may be taken. It can be batched by `jax.vmap`, and
    used in jit, scan, remat and `jax.shard_map`.

    Args:
      x: array of shape (..., k), of float16, bfloat16, float32 or float64.
      w: array of shape (vocabulary, k), as an embedding has it, or with a vocabulary_axis of 1
        (k, vocabulary), as a head's kernel has it.
      labels: integers of shape (...), from 0 up to the vocabulary.
      bias: None, or a floating-point array of shape (vocabulary,). Minus infinity takes an entry
        out of the vocabulary, where there is no soft_cap.
      label_smoothing: from 0 to 1, the part of the target that all of the vocabulary shares.
      z_loss: factor of the square of lse.
      soft_cap: None, or what the magnitude of logits stays below.
      ignore_index: None, or a label of tokens that contribute nothing, whatever x has there.
      weights: None, or a floating-point array that broadcasts to labels: what the loss of each
        token is multiplied by. A mean is divided by their sum.
      reduction: "mean", over the tokens that are not ignored (0 if there is none), "sum", or
        "none".
      recompute: make the logits again for the gradients of a "mean" or "sum", too: a third more
        products, and least memory.
      vocabulary_axis: the dimension of w that is the vocabulary: 0 or 1. Neither is copied, and the
        gradient is arranged as w is.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of axes, whose devices each have
        an equal part of the vocabulary, in their order: w and bias are a device's own, labels are
        those of the whole vocabulary. Three numbers a token are exchanged (two of a mean or sum).
      token_axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of axes, whose devices each
        have other tokens: a mean or sum is that over all of them.
      chunk_bytes: the most that is stored of the logits at a time; None takes a quarter of a
        gibibyte, or for gradients the size of x in float32 if that is more, or for those in three
        products a whole one, or the size of w in float32 if that is more. They are taken to be
        stored in 2 bytes, of float32 4 and of float64 8. Chunks have whole rows forwards, so that
        one is the least.
      precision: as for `matmul`, of every product.
      implementation: name of an implementation that runs every product, or the call fails; None
        selects one.
      batch_invariant: True, a number of tokens, False, or None, as for `matmul`: the loss of each
        token is the same, bit by bit, whatever other tokens there are, and so are the rows of the
        gradient of x for the same cotangents. Gradients of w and bias, and a "mean" or "sum" itself
        and what it divides by, add up tokens and are not. Logits of a chunk are stored, and made
        again for gradients, by chunks of the vocabulary that are chosen for that number of tokens.
        On a CPU a soft_cap is not covered: XLA's loops round it in more than one way.

    Returns:
      The loss, float32 (float64 for float64): a scalar, or of the shape of labels for "none".

    Raises:
      TypeError: for operands or labels of other dtypes.
      ValueError: for shapes that do not fit, numbers out of range, an unknown reduction or
        implementation, an axis that is not a manual one here, operands that are divided over
        explicit mesh axes inside of a `jax.shard_map` whose axes are named, or labels out of range,
        where they are known when it is traced, and with batch_invariant for a vocabulary that
        devices share, or products that only XLA runs. Of other labels the loss is NaN, and so are
        the gradients.

    Numerics:
      Logits accumulate as of `matmul` and are not rounded: soft cap, exponentials and sums are
      computed in float32 (float64 for float64). What gradients are multiplied from is rounded once
      to the dtype of x and w, to bfloat16 where that is float16, and so is x once more, times a
      number for each token. Gradients of w and x accumulate in float32 over chunks too, and are
      rounded at the end, those of a mean or sum before they are multiplied by the cotangent
      (float32 is kept of float16 until then). The label's logit is computed apart, in float32,
      where logits are not stored; on CUDA those of float32 operands take part in TF32 unless the
      precision is HIGHEST. Exponentials are taken beside it; where a token's loss is above 60, its
      chunk is done again beside the largest logits. Stored logits are taken beside their largest.
      The same program on the same device gives the same bits each time.

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
    """The log-probabilities of given tokens, from the logits of a linear layer.

        z[..., v] = sum over k of x[..., k] * w[v, k] + bias[v]
        log_prob[...] = z[..., labels] - lse(z)
        entropy[...] = lse(z) - sum over v of softmax(z)[..., v] * z[..., v]

    with a soft_cap as for `linear_cross_entropy`, whose losses these are with the other sign; for
    policy gradients, ratios of policies, and scores. They take one product, and their gradients
    three more, which make the logits again by chunks of the vocabulary.

    Args:
      x: as for `linear_cross_entropy`. A temperature divides it.
      w: as for `linear_cross_entropy`.
      labels: as for `linear_cross_entropy`: the tokens that were drawn.
      bias: as for `linear_cross_entropy`.
      soft_cap: as for `linear_cross_entropy`.
      ignore_index: None, or a label of tokens of which everything is 0.
      with_entropy: return the entropies, too.
      vocabulary_axis: as for `linear_cross_entropy`.
      axis_name: as for `linear_cross_entropy`.
      chunk_bytes: as for `linear_cross_entropy`.
      precision: as for `linear_cross_entropy`.
      implementation: as for `linear_cross_entropy`.
      batch_invariant: as for `linear_cross_entropy`, for entropies, too.

    Returns:
      The log-probabilities, of the shape of labels and float32 (float64 for float64); with_entropy
      a pair of these and the entropies, alike.

    Raises:
      TypeError: as `linear_cross_entropy` does.
      ValueError: as `linear_cross_entropy` does.

    Numerics:
      As of `linear_cross_entropy`. Both results are differentiable, in reverse mode, as of it.

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
    """The arguments of a call, checked.

    Tokens that are ignored have zeros as features and the first label, and are not `kept`.
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
        """The weights of the tokens, of the shape of the labels, 0 for those that are ignored."""
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
        """The sum over the devices that have other tokens."""
        if not self.token_axes:
            return x
        return lax.psum(*same_varying(x, over=self.token_axes), self.token_axes)

    def _divided(self, own, operands, *, is_sum: bool):
        """What a function makes of the operands, each device of its part over explicit axes."""
        if self.division is None:
            return own(self.how, self.token_axes, *operands)
        how = dataclasses.replace(self.how, axis_name=self.division.vocabulary or None)
        own = functools.partial(own, how, self.division.token_axes)
        return self.division.run(own, operands, is_sum=is_sum)


def _rows(how: How, token_axes, operands):
    """Operands with their tokens along one dimension, that vary over all axes that any does."""
    x, w, bias, *rest = operands
    rows = [lg.rows(x), *(a.reshape(-1) for a in rest)]
    present = [rows[0], w, *([] if bias is None else [bias]), *rows[1:]]
    x, w, *rest = same_varying(*present, over=(*(how.axis_name or ()), *token_axes))
    return (x, w, None, *rest) if bias is None else (x, w, *rest)
