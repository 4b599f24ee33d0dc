"""Computes the steps of an engine: from planned requests to tokens, vectors and beams."""
