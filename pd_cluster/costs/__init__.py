"""The times that serving takes on a machine, for predictions, roles, the simulator and the planner."""
