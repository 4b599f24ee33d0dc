"""Fair queueing among clients, and estimates of when clients stop waiting."""
