"""Converts parsed requests to generations: token ids, sampling parameters, limits."""
