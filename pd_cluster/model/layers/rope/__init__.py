"""Rotary positions: tables, scaling by length, and the limit of positions."""
