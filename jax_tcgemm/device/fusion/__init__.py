"""Products with an epilogue on one device: problems, plans, and calls."""
