"""/openapi.json and the code that builds it."""
