"""Pictures: the vision tower and its features."""
