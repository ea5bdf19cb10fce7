"""Records of other systems, and synthetic ones in which the truth is known."""
