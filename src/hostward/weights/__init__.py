"""Weight offloading stores weights of chosen layers in host memory and prefetches them before their use."""
