"""Splits a model's output text into reasoning, content and tool calls as it arrives, and builds guides for tools.

Pure: text in, parts out. Knows nothing of HTTP, tokens, tokenizers or devices.
"""
