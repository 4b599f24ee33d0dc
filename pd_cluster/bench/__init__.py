"""Benchmarks for users."""
