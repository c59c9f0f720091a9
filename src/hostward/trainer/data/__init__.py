"""Provide training data: text, JSON lines, Megatron's indexed files, and their tokenizers."""
