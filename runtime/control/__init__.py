"""The controller: a run from its options to its summary."""
