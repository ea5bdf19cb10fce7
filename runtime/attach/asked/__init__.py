"""What the watcher of a training that is not ours asks of its ranks, and how they read it."""
