"""Public functions of grouped products, and of rows of groups."""
