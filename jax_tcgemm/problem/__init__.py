"""Descriptions of problems as plain data: operands, dtypes, precision and epilogues."""
