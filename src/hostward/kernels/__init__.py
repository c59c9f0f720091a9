"""Provide the AdamW step and the gradient norm as numpy definition, native host kernels and Triton kernels.

Importing this package needs neither Triton nor a device; calling a device kernel without them raises a typed error.
Host and device kernels are bitwise identical with `hostward.kernels.reference`, the numpy definition.
"""

from __future__ import annotations
