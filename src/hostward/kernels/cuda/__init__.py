"""Run the optimizer step and the gradient norm on a CUDA device, as Triton kernels."""
