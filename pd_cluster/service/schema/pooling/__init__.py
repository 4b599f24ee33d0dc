"""Schemas of requests whose prompts are computed and not continued."""
