"""Pure thought: no torch, no files, no clock."""
