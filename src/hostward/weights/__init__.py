"""Weight offloading: weights of chosen layers live in host memory and are prefetched before their use."""
