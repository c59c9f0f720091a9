"""Device kernels: the exact AdamW step and the exact gradient norm on a CUDA device, written in Triton.

Importing this package needs neither Triton nor a device; calling a kernel without them raises a typed error. The
kernels give the same bits as `hostward.kernels.reference`, the numpy definition, and as the native host kernels.
"""

from __future__ import annotations
