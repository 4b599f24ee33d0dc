"""Timelines of requests, as text and pictures."""
