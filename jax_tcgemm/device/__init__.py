"""What one device does: folds a product, plans it and makes the call, or leaves it to XLA."""
