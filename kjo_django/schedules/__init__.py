"""Periodic schedules: what the code declares, and the ticks that are due."""
