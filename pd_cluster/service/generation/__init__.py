"""From token ids to final text: one request's prompts, sequences and streams."""
