"""What a torch model is to hostward: its parameters and their names, its layers, and hooks on both."""
