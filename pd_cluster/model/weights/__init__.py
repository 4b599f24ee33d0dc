"""Weights of layers as files store them: plain or quantized tensors, and the forms that they become."""
