"""Threads and child processes for work on text."""
