"""Counters, timelines and spans of one process's requests."""
