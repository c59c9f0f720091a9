"""Find a torch model's parameters, their names and its layers, and install hooks on them."""
