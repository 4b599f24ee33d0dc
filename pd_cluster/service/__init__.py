"""Answers clients' requests, in text, through a router. Independent of HTTP."""
