"""Arrays of 8 bits: how they are made, and training with them."""
