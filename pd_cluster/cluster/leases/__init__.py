"""The lease that determines which of several schedulers owns membership, and the stores that keep it."""
