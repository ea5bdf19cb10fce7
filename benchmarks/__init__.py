"""Benchmarks: figures measured against their bars, a module for each part; registry.py names them."""
