"""The rules of each kind of model that takes pictures."""
