"""What has to be done about compiled models."""

from __future__ import annotations

import logging
import sys

import torch

log = logging.getLogger("hostward")


def forget_compiled() -> None:
    """Let whatever a compiler has made be made anew: dynamo looks at a module's hooks when it compiles a caller, and
    never again, so a graph from before would go on without ours.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["stats"]["unique_graphs"]:
        log.info("code that was compiled before is compiled anew, so that it calls the hooks of hostward")
        torch.compiler.reset()
