"""Primitives of tensor operations, which cuTENSOR runs."""
