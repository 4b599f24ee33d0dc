"""The time that serving takes, as numbers that fit a machine: predictions, roles, simulator and planner share them."""
