"""Partition, placement and schedule of one pipeline tuned together (AdaPtis)."""
