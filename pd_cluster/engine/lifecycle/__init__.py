"""Whether a worker takes requests: it may drain or sleep."""
