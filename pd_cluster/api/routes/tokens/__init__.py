"""Routes for token ids: generate from them, render prompts to them, and convert them to text."""
