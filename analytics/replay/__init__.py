"""A recorded run decided again from its log, and other detectors over it."""
