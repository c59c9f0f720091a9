"""Lower a placement to a schedule of operations and check its order, without importing torch."""
