"""Streams that clients may resume after their connection, or their scheduler, is lost."""
