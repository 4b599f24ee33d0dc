"""How rank processes start."""
