"""The muscles: the controller, the node agent, and the ranks. Only this package imports torch."""
