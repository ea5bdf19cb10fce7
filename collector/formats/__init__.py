"""Other tools' files, in and out: one module per format."""
