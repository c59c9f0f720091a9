"""Run the operations of a schedule on streams and buffers of one of two backends, CUDA or simulated."""
