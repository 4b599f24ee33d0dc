"""Loads a checkpoint, and checks that the loaded model computes correct results."""
