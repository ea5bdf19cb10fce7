"""Chunk times -> cost model: the fit, when it is made again, and its back-test."""
