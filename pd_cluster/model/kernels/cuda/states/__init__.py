"""Recurrent layers on CUDA."""
