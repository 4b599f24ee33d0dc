"""Builds engines and workers from their parts."""
