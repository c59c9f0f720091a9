"""What attaches to a user's model: the optimizer."""
