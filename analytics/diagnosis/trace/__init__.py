"""Operations of a trace as a graph, replayed with other durations."""
