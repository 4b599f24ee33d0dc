"""Running requests: their origin, their sequences, and records to resume them from."""
