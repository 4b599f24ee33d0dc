"""Connections, and requests before they reach a route."""
