"""Talks to a running cluster: requests as a client sends them, and its admin address."""
