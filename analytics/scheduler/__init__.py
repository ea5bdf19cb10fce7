"""What to change in a running job: candidates, recovery, and whether a change repays its cost."""
