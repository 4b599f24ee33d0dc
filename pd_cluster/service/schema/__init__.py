"""Schemas of requests, and errors, in clients' formats."""
