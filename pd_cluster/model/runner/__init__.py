"""Runs the steps of a loaded model on one rank."""
