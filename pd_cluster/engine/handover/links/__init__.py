"""The links between prefill and decode instances, as the two ends see them."""
