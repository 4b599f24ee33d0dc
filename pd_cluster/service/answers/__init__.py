"""From tokens to answers for clients."""
