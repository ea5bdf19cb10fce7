"""What a lost rank costs the others, by each way of recovery, and whether the losses stay the same."""
