"""The whole loop on real runs: kills, a slow rank, an outage of the collector, what instrumentation costs."""
