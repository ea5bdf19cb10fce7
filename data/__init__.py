"""Data of the studies and emulated devices: rates, lengths, noise, profiles, each with its source."""
