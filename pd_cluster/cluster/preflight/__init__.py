"""Checks the network before the start: with `hccn_tool`'s reports on NPUs, and by sending KV blocks between real
processes.
"""
