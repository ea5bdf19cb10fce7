"""Degrees, layers and micro-batches together, with bounds that prove the gap."""
