"""Run the optimizer step on the CPU: native AdamW, norm, accumulation and copies, and their thread count."""
