"""How operands and results are divided over devices, and what one device has to do then."""
