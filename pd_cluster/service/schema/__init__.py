"""Requests and answers in clients' formats."""
