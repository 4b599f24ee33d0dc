"""Schemas of requests that have token ids in place of text."""
