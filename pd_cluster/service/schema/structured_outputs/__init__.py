"""Converts a request's fields to the guide that its answer must follow."""
