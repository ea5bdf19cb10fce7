"""A run in another tool's format; a module per format."""
