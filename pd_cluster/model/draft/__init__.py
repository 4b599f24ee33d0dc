"""Draft heads: layers after a model's own that guess its next tokens."""
