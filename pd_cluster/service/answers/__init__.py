"""Makes clients' answers from tokens."""
