"""The links between prefill and decode instances, at both ends."""
