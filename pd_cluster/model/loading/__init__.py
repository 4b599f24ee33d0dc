"""Loads a checkpoint, and checks that the loaded model computes the right numbers."""
