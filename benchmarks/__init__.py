"""Measurements for contributors; needs a checkout."""
