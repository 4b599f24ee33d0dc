"""Counts, timelines and spans of the requests of one process."""
