"""What there is and what it does: `info`, `explain`, and the fragments of an instruction."""
