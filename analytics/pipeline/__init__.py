"""Schedules, their timelines, bubbles, memory, and the predicted iteration."""
