"""Fair queueing among clients, and estimates of when clients give up waiting."""
