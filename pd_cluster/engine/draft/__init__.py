"""Drafts of tokens that an engine verifies together with the next one."""
