"""The collector process, and what keeps a store whole: check, rebuild, compaction, retention."""
