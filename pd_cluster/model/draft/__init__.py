"""Draft heads: layers after a model's last layer that predict its next tokens."""
