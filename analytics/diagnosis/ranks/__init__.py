"""Ranks held against their own past and against each other, where no plan or lengths say what their work should take."""
