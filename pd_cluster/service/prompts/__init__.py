"""Converts messages to tokens."""
