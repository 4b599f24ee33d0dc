"""Processes of one host: their ports, their starts, their ends."""
