"""Makes quantized model folders out of plain ones."""
