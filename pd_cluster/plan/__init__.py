"""Searches for the layout that serves a load within its goals, by simulation with measured or computed costs."""
