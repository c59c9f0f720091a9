"""Streams, buffers, and the two backends (CUDA, simulated) that carry out the operations of a schedule."""
