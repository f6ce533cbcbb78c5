"""Problems of tensor contractions, reductions and elementwise operations."""
