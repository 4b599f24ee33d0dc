"""Puts engines and workers together from their parts."""
