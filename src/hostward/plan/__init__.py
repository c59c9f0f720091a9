"""Predict memory and time of a step before it runs, and choose the best placement within budgets. No torch."""
