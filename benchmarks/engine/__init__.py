"""Measurements of one engine's steps."""
