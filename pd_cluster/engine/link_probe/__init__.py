"""Transfers KV blocks over a link on trial, without a model. Each end of the link is a process."""
