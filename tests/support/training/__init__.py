"""Runs of ours: small real ones, ranks that are threads, what their losses must be."""
