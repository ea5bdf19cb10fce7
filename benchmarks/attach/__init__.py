"""A training that is not ours: what watching costs it, what is found in it, what acting on it gains."""
