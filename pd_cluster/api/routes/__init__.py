"""The routes for clients."""
