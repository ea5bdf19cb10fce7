"""Plans: the pipeline model, the planners, policies and the papers' studies."""
