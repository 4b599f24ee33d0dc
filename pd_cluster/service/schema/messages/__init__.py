"""The schema of /v1/messages, and the chat that a request asks for."""
