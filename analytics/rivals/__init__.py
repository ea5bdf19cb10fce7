"""Published fail-slow detectors behind one interface, beside ours."""
