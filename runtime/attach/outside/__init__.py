"""A training that is not ours, from outside: its ranks' log and processes, and the command that starts it."""
