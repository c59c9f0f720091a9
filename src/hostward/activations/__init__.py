"""Activation offloading: a layer's saved tensors leave the GPU in forward, and are prefetched before its backward."""
