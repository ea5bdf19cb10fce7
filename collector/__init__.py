"""The event log: types, writing, collecting, reading. Knows nothing of training."""
