"""The backend for CUDA devices: streams, events, work and memory."""
