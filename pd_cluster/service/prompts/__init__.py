"""From messages to tokens."""
