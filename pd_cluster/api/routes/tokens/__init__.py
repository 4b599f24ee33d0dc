"""Routes of token ids: they generate from ids, make ids from prompts, and turn ids into text."""
