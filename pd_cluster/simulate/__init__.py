"""A cluster without devices: the parts that decide are real, a jumping clock and costs stand for time."""
