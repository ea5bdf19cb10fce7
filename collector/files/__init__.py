"""The form of what lies on disk: segments, flushes, rows, the manifest, and how they are followed."""
