"""Which ranks are slow where no lengths are recorded: stages, micro-batches and ranks, estimated together."""
