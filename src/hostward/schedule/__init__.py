"""Turn a placement into a schedule of operations, and check its order. No torch."""
