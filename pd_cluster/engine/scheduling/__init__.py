"""Decides which requests' tokens a step computes, within the available blocks and tokens. Uses only integers."""
