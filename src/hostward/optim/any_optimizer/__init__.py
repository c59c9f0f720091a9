"""Offload the state of any other torch optimizer, which keeps its own update rule."""
