"""Runs one engine on several devices."""
