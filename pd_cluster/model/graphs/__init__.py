"""Steps captured as graphs and replayed."""
