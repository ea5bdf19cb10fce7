"""Stores with something in them, and what any store must do."""
