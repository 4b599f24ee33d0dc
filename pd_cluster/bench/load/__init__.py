"""Sends load with guidellm, in its own process, and joins its results with the cluster's timelines."""
