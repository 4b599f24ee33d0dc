"""The devices that torch computes on: names, streams, groups of ranks."""
