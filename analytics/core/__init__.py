"""What a plan, a micro-batch, a cost, a fault and a device profile are."""
