"""The kernels for each kind of device, and the choice of an attention backend."""
