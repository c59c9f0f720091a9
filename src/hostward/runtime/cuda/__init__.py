"""The CUDA backend runs operations with streams, events and memory of a CUDA device."""
