"""The simulated backend runs operations on the CPU, in the latest legal order and with a race detector."""
