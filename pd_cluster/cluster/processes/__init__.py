"""Starts, supervises and ends the processes of one host, and chooses their ports."""
