"""The lease that names which of several schedulers owns membership, and the stores that keep it."""
