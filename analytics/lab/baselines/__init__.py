"""Published detectors behind one interface."""
