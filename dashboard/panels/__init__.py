"""The parts of a page, a module each."""
