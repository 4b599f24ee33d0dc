"""Instances as a scheduler sees them: their state, their links, their prefix caches, their units."""
