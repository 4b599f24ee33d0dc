"""Chooses instances for a request: policies, predictions and capacity. Pure functions of instance state."""
