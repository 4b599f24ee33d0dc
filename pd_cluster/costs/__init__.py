"""Time costs of serving on one machine, for predictions, roles, the simulator and the planner."""
