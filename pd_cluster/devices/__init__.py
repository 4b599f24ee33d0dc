"""Devices: names, streams, process groups, cores."""
