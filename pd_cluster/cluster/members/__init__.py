"""Membership: which instances exist, how they join and leave, and what operators change about all of them."""
