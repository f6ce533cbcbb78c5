"""What a product is: operands, dtypes and precision, what follows it; all of it data."""
