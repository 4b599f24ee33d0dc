"""Changes of instances' roles between prefill and decode, by load or by cost."""
