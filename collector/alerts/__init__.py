"""Alert rules over the log: what opens and closes, and telling it once."""
