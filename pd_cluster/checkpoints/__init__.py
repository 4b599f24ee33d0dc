"""Reads model folders."""
