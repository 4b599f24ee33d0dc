"""Steps captured as graphs, then replayed."""
