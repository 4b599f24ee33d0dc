"""Transfers KV blocks over a trial link, without a model. Each end of the link is a process of its own."""
