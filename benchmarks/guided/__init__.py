"""Measurements of guides."""
