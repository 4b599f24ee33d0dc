"""Starts rank processes."""
