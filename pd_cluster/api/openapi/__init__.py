"""Builds /openapi.json."""
