"""The sender of a request: its limits, and the names that it may use."""
