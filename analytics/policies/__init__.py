"""Who reacts to an event of a cluster, and how: ours and the published ones behind one interface."""
