"""The layers around all routes: API keys, queue places, errors, draining."""
