"""Plans and calls on one device: a product is folded, planned, and called or run by XLA."""
