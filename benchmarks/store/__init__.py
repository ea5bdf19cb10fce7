"""The store: ingest, answers, exchange, and what it makes of faults."""
