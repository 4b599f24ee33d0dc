"""Routes that compute prompts without generating: vectors, scores, classes."""
