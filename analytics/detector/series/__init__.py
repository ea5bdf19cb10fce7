"""Series in which neighbours are no independent witnesses: their noise, and the stretches in which they lie higher."""
