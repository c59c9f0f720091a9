"""Options with Megatron's names: their declaration, parsing and validation. No torch."""
