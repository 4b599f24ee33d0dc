"""API keys, their tenants and their limits."""
