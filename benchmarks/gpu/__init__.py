"""On a GPU, where one is at hand: our own trainer on it, and trainings that are not ours."""
