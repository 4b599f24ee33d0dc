"""Offline use: calls the same engine and text service from Python, without HTTP."""
