"""Parts of layers: what the members of a tensor-parallel group hold, and what they exchange."""
