"""ResiHP's Detector, for runs and back-tests alike: change points of iteration times, profile, filter, validation."""
