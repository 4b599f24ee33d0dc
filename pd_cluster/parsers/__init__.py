"""A model's output text read as reasoning, content and tool calls, piece by piece, and the guides that tools ask for.

Pure: text in, parts out. Knows nothing of HTTP, tokens, tokenizers or devices.
"""
