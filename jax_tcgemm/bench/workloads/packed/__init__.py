"""Workloads of packed weights."""
