"""Makes the instances of a unit connect, meet, compute in step, and end together."""
