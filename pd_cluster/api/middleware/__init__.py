"""The layers around all routes: API keys, reservations, errors, draining, traces."""
