"""Threads, child processes and memory, shared fairly among clients."""
