"""Fail-slow and fail-stop: who is slow, who only suffers, and the verdicts."""
