"""How operands and results are sharded over devices, and what one device has to do then."""
