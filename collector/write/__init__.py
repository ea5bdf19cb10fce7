"""What writes the log: spools of telemetry, control streams, commands of people."""
