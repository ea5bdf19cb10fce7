"""A rank: what it executes, commits, migrates and records."""
