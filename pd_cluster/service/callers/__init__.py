"""Describes the sender of a request: its limits, and the model names that it may use."""
