"""Shares threads, child processes and memory fairly among clients."""
