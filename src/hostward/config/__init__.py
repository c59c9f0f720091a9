"""Declare, parse and validate options with Megatron's names. No torch."""
