"""Makes final text from token ids: one request's prompts, sequences and streams."""
