"""Stores uploaded files and batches on disk, and defines the states of batches."""
