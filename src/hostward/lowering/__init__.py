"""Pure passes from a plan to a schedule. No torch."""
