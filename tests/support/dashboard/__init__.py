"""Stores and runs for the dashboard to show, and a real browser on it."""
