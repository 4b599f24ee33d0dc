"""Decides what one step computes: requests in order, within the available blocks and tokens. Integers only."""
