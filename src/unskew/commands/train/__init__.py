"""The commands of a run, live."""
