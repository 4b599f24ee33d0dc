"""Determines whether a worker takes requests: it may drain, sleep, or change its weights."""
