"""Weights of layers as files store them, plain or quantized, and the forms into which they are converted."""
