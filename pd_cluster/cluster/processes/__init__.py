"""Runs one host's processes, and chooses their ports."""
