"""Clients of a running cluster: for requests, and for its admin address."""
