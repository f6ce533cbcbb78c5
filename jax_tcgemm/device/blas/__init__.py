"""BLAS calls on one device."""
