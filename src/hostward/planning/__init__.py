"""Planning a step before it runs: its time, its bytes, the best choice within budgets. No torch, no side effects."""
