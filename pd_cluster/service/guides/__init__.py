"""Guides are tried in child processes before anything is computed."""
