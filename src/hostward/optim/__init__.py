"""Optimizer offloading: AdamW whose state, fp32 main weights and gradients live in host memory."""
