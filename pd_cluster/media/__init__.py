"""Pictures of prompts: from a file's bytes to the pixels and tokens that a model reads."""
