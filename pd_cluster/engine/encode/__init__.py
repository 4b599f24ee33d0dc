"""Encoder instances, which compute images' features, and the prefill instances' side of them."""
