"""Research: the simulator, published baselines, the studies. Nothing outside imports it."""
