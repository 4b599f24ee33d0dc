"""Both ends of the links between prefill and decode instances."""
