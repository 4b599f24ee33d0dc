"""Summarizes the state of a cluster, now and in the last minutes, for people."""
