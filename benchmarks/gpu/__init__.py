"""All GPU measurements, in one command of bounded length."""
