"""Encoder instances, which compute the features of images, and the parts of prefill instances that use them."""
