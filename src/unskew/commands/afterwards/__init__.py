"""The commands that explain a finished run."""
