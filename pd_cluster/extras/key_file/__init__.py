"""API keys in a file, with tenants and limits, for --api-key-file."""
