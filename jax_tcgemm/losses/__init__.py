"""Losses and largest entries of a linear layer over a vocabulary, whose logits are not stored."""
