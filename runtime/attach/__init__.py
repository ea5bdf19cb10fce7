"""A training loop that knows nothing of Unskew: measured inside its ranks, and judged from outside while it runs."""
