"""The instances: which exist, their state, and their intended role."""
