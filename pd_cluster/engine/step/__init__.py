"""One step of an engine: from planned requests to tokens, vectors and beams."""
