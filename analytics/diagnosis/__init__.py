"""A finished or imported log, explained: causes, time lost, what-if."""
