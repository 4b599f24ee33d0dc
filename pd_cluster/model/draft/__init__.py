"""Draft heads: layers behind a model that guess its next tokens."""
