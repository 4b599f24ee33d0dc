"""Processes of one host: ports, start, supervision, end."""
