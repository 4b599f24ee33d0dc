"""Schemas of requests that compute prompts without generating."""
