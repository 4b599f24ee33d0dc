"""The log of requests and their answers, with --enable-log-requests."""
