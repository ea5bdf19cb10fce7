"""What can be done about a training that is not ours: proposed with a predicted gain, approved, applied, scored."""
