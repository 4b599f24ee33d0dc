"""Schemas of requests with token ids instead of text."""
