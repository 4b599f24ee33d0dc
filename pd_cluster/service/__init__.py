"""Answers clients' requests, in text, by a router. Independent of HTTP."""
