"""Benchmarks: figures measured against their bars, a room for each subject, a module for each part; registry.py names them."""
