"""The instances of a unit: how they connect, meet, compute in step, and end together."""
