"""What reads and writes files for analytics, which does neither."""
