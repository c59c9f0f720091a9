"""The step on the host: the native AdamW and norm, their numpy definition, the thread count."""
