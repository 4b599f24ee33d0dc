"""Measurements of the offline service against its parts."""
