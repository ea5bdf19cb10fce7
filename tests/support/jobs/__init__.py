"""Trainings that are not ours, for the tests and benches that watch them."""
