"""Lanes, buffers and the two backends that carry out operations on them."""
