"""Measurements of the router and its queue."""
