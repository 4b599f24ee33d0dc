"""Makes quantized model folders from unquantized ones."""
