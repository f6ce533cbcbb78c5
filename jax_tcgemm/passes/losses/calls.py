"""Calls that replace the logits of a loss in a program; their names say what they compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm.losses import logits as lg
from jax_tcgemm.losses import rows as loss_rows
from jax_tcgemm.losses import sums as loss_sums
from jax_tcgemm.losses.how import How
from jax_tcgemm.losses.top_k import argmax_of_logits
from jax_tcgemm.passes.losses.values import NotALossError
from jax_tcgemm.primitives.rules import same_varying

# Prefix of the names of these calls in a program.
NAME = "tcgemm_loss"


@dataclasses.dataclass(frozen=True)
class Product:
    """Product by the gradient of the logits, that is, a gradient of the features or the weights.

    Attributes:
      eqn: equation of the product.
      side: number of the operand that is the gradient.
      is_of_w: whether the other operand is the weights; else it is the features.
    """

    eqn: core.JaxprEqn
    side: int
    is_of_w: bool

    def arranged(self, dx, dw, db, vocabulary_axis: int):
        """Return the product's result from the gradients of x, w and bias."""
        del db
        contract, batch = self.eqn.params["dimension_numbers"]
        axes, others = contract[self.side], contract[1 - self.side]
        axis = dx.ndim - 1
        if self.is_of_w:
            fits = tuple(axes) == (axis,) and tuple(others) == (vocabulary_axis,)
            dims = [*range(axis)], [axis]  # dimensions of dx that are of each operand
        else:
            pairs = sorted(zip(axes, others, strict=True))
            fits = pairs == [(i, i) for i in range(axis)]
            dims = [vocabulary_axis], [1 - vocabulary_axis]
        if not fits or any(batch):
            raise NotALossError("the gradient of its logits must be multiplied as x and w are")
        order = dims[0] + dims[1] if self.side == 0 else dims[1] + dims[0]
        found = dx if self.is_of_w else dw
        return found.transpose([order[i] for i in self.eqn.params["permutation"]])


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sum over the tokens of the gradient of the logits, that is, the gradient of the bias.

    Attributes:
      eqn: equation of the sum.
    """

    eqn: core.JaxprEqn

    def arranged(self, dx, dw, db, vocabulary_axis: int):
        """Return the sum's result from the gradients of x, w and bias."""
        del dx, dw, vocabulary_axis
        return db.astype(self.eqn.outvars[0].aval.dtype)


@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls that replace the logits of one loss.

    Attributes:
      how: parameters of the loss, as of a call of `linear_cross_entropy`.
      shape: shape of the logits.
      has_bias: whether the logits have a bias.
      products: products by the gradient of the logits, and its sums.
      places: shape and dtype of each argmax of the logits that the program takes.
      size: bytes of the logits.
    """

    how: How
    shape: tuple[int, ...]
    has_bias: bool
    products: tuple[Product | Sums, ...]
    places: tuple[tuple[tuple[int, ...], np.dtype], ...]
    size: int

    def named(self, kind: str):
        """Return one of the methods below as a named `jax.jit` function of x, w, (bias,) ..."""
        method = getattr(self, kind)

        def function(x, w, *rest):
            x, w, *rest = same_varying(x, w, *rest)
            return method(x, w, *rest) if self.has_bias else method(x, w, None, *rest)

        function.__name__ = f"{NAME}_{kind}_{self.size // 10**6}"
        return jax.jit(function)

    def values(self, x, w, bias, label):
        """Return the log-sum-exp and the loss of each token."""
        x, label, has_label, _ = self._flat(x, label)
        losses, lse = loss_rows.token_losses(self.how, False, x, w, bias, label)
        return self._shaped(lse, losses, has_label)

    def values_and_gradients(self, x, w, bias, label, a, c):
        """Return `values` and `gradients` of the logits' gradient a softmax(z) + c [v = label]."""
        rows, label, has_label, (a, c) = self._flat(x, label, a, c)
        c = jnp.where(has_label, c, 0)
        losses, lse, *found = loss_sums.losses_and_gradients(self.how, rows, w, bias, label, a, c)
        return *self._shaped(lse, losses, has_label), *self._products(x, *found)

    def gradients(self, x, w, bias, label, lse, a, c):
        """Return the products by the logits' gradient a softmax(z) + c [v = label]."""
        rows, label, has_label, (lse, a, c) = self._flat(x, label, lse, a, c)
        gradient = loss_rows.Gradient(a, jnp.where(has_label, c, 0))
        found = loss_rows.gradients_of(self.how, rows, w, bias, label, lse, gradient)
        return self._products(x, *found)

    def largest(self, x, w, bias):
        """Return the argmax of each token's logits, in every shape and dtype of `places`."""
        found = argmax_of_logits(self.how, lg.rows(x), w, bias)
        return [found.reshape(shape).astype(dtype) for shape, dtype in self.places]

    def _flat(self, x, label, *rows):
        label, rows = label.reshape(-1), [row.reshape(-1) for row in rows]
        has_label = (label >= 0) & (label < self.shape[-1])
        label = jnp.where(has_label, label, 0).astype(jnp.int32)
        return lg.rows(x), label, has_label, rows

    def _shaped(self, lse, losses, has_label):
        found = lse, jnp.where(has_label, losses, jnp.nan)
        return [row.reshape(self.shape[:-1]) for row in found]

    def _products(self, x, dx, dw, db):
        dx, axis = dx.reshape(x.shape), self.how.vocabulary_axis
        return [product.arranged(dx, dw, db, axis) for product in self.products]


def loss_note(eqn: core.JaxprEqn) -> str:
    """Return the note of `explain` on the products of a loss call; "" for other equations."""
    name = str(eqn.params.get("name", ""))
    if not name.startswith(NAME):
        return ""
    kind, _, megabytes = name.removeprefix(f"{NAME}_").rpartition("_")
    size = f"its logits, {megabytes} MB in float32, are not stored"
    return {
        "values": f"a loss: {size}",
        "largest": f"where logits of a loss are largest: {size} but made again for that",
        "values_and_gradients": f"a loss and its gradients: {size}",
        "gradients": f"gradients of a loss: {size} but made again, since what they are multiplied "
        "by is known after the loss",
    }[kind]
