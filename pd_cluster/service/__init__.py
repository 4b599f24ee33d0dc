"""Text in, text out, over a router, independent of HTTP."""
