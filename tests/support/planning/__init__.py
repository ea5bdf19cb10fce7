"""Plans one by one: all of a small job, all of Malleus' templates, any legal one."""
