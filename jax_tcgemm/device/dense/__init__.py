"""Dense products on one device: problem, plan, and call."""
