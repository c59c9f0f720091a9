"""Activation offloading moves saved tensors of layers to the host in forward and prefetches them before backward."""
