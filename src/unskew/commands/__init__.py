"""The commands of `unskew`, a module per group; each imports what it needs when called, so that --help stays instant."""
