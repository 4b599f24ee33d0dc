"""Routes whose prompts are computed and not continued: vectors, scores, classes."""
