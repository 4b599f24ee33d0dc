"""Converts pictures and videos of prompts from a file's bytes to a model's pixels and tokens."""
