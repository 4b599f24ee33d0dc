"""Checks guides in child processes before anything is computed."""
