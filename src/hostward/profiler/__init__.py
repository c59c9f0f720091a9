"""Measure a model's layers on the meta device: what they save, compute and hold."""
