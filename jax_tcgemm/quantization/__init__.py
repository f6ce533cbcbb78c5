"""8-bit arrays: quantization, and training with 8-bit products."""
