"""Train models as the reference trainer behind `hostward train`: models, data, learning rate, loop, reports."""
