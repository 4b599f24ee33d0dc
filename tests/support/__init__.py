"""Shared test tools: tiny checkpoints, the cluster harness, engines in one process."""
