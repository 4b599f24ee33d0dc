"""Decides where a request goes and when, and collects the outputs."""
