"""Settings: their declarations, values and checks."""
