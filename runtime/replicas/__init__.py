"""Replicas that fail and return as wholes: a rank by FT-HSDP's rules, its ring all-reduce, its catch-up."""
