"""What reads the log: the store as SQL views, for programs and for people."""
