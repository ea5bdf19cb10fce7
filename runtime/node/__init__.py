"""A node: the agent, the zygote that forks ranks, heartbeats."""
