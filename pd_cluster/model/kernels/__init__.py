"""Kernels of each kind of device, and the choice of the attention backend among them."""
