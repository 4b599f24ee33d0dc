"""HTTP servers: OpenAI's API, vLLM's /generate, the admin port, the workers' port."""
