"""Fetches, prepares and holds the images and videos of prompts within bounds."""
