"""The ranks themselves: what messages and tensor parallelism cost."""
