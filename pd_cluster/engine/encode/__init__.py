"""Encoder instances, which compute images' features, and the prefill instances' use of them."""
