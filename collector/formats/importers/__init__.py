"""Other tools' files -> events; a module per format, pure readers."""
