"""The optimizer step and the gradient norm as Triton kernels, and how they are launched."""
