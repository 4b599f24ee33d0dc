"""Routes of token ids: generating from them, making them of prompts, and texts of them again."""
