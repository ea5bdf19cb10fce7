"""What is known of a device beside its chunk times: liveness, timeouts, probes, GPU counters."""
