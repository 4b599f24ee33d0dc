"""Offline use: the same engine and the same text service, called from Python instead of over HTTP."""
