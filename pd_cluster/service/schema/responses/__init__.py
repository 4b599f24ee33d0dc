"""The schema of /v1/responses, and the chat that a request asks for."""
