"""What a watched loop is timed by: a thread on its core, or a GPU."""
