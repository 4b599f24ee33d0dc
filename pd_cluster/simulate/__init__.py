"""A cluster without devices: the parts that decide are real, steps take computed costs, and the clock jumps ahead."""
