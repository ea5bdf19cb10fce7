"""What the log comes to, kept up to date by the collector: rollups, health, plans, decisions, device history."""
