"""Answers clients' requests, in text, over a router. Independent of HTTP."""
