"""HTTP: OpenAI's API, vLLM's /generate, the workers' own."""
