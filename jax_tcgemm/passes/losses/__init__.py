"""Rewrite pass for losses: recognition of losses with logits, and calls without logits."""
