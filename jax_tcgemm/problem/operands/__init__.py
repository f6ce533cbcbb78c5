"""Operands that are quantized: their encodings, scales and layouts."""
