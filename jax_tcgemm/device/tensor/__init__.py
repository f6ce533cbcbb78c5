"""Tensor operations on one device."""
