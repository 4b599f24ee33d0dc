"""Checks the network before the start: reads `hccn_tool`'s reports on NPUs, and sends KV blocks between real processes.
"""
