"""Converts text to tokens and back: tokenizers, templates, grammars."""
