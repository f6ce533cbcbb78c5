"""Losses over whole logits, with which those over logits that are never all there are compared."""

import numpy as np


class Reference:
    """Losses and entropies of tokens from whole logits, and their gradients, in NumPy's float64."""

    def __init__(self, x, w, bias=None, labels=None, soft_cap=None, label_smoothing=0.0, z_loss=0):
        self.x, self.w = (np.asarray(a, np.float64) for a in (x, w))
        z = self.x @ self.w.T + (0 if bias is None else np.asarray(bias, np.float64))
        self.slope = 1.0
        if soft_cap is not None:
            z = soft_cap * np.tanh(z / soft_cap)
            self.slope = 1 - (z / soft_cap) ** 2
        lse = np.logaddexp.reduce(z, -1, keepdims=True)
        is_label = np.asarray(labels)[..., None] == np.arange(z.shape[-1])
        losses = lse + z_loss * lse**2 - (z * is_label).sum(-1, keepdims=True)
        losses += label_smoothing * (z * is_label - z / z.shape[-1]).sum(-1, keepdims=True)
        self.p = np.exp(z - lse)
        mean = (self.p * z).sum(-1, keepdims=True)
        self.losses, self.entropies = losses[..., 0], (lse - mean)[..., 0]
        self.of_losses = self.p * (1 + 2 * z_loss * lse) - is_label
        self.of_losses += label_smoothing * (is_label - 1 / z.shape[-1])
        self.of_entropies = self.p * (mean - z)

    def gradients(self, losses=0.0, entropies=0.0):
        """Of x, w and bias, from the cotangents of losses and entropies, which broadcast."""
        losses, entropies = (
            np.broadcast_to(ct, self.losses.shape)[..., None] for ct in (losses, entropies)
        )
        dz = (losses * self.of_losses + entropies * self.of_entropies) * self.slope
        rows = dz.reshape(-1, dz.shape[-1])
        return dz @ self.w, rows.T @ self.x.reshape(-1, self.x.shape[-1]), rows.sum(0)

    def mean(self, weights=1.0):
        """The weighted mean of losses, and its gradients of x, w and bias."""
        weights = np.broadcast_to(np.asarray(weights), self.losses.shape)
        shares = weights / weights.sum()
        return (shares * self.losses).sum(), self.gradients(shares)
