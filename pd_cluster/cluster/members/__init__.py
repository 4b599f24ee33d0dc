"""Membership: the existing instances, how they join and leave, and operators' commands to all of them."""
