"""Linear layers on CUDA: plain, quantized, for few rows, and with adapters."""
