"""The instances of a unit: how they find each other, meet, compute in step, and end together."""
