"""A run for which a published policy decides."""
