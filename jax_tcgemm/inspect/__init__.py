"""Inspection of the installation, `info`, of programs, `explain`, and of fragments."""
