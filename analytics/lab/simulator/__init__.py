"""A simulated job: events in time, a policy that reacts, and what the time went to."""
