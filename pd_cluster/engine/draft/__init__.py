"""Guesses tokens (drafts) that an engine verifies together with the next token."""
