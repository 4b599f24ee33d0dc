"""Encoders of their own: instances that compute images' features, and what prefill instances need to ask them."""
