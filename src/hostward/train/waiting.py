"""Models whose weights leave: built on the CPU, so that the device never holds all of them, with the bits that weights
drawn on the device have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hostward.config import Config
from hostward.inventory import layer_of
from hostward.planning.plan_file import PlanFile
from hostward.training.layers import find_layers
from hostward.training.planned import layers_of

from .drawn import fill, without_memory
from .models import meta_model
from .ranks import Ranks


@dataclass(frozen=True, slots=True)
class Leaving:
    """Weights of the first `layers` layers that are here, and this rank's bytes of them. Of one process they wait on
    the CPU until they are attached; stages, and parts of what ranks share, lie on the device until then.
    """

    layers: int
    weight_bytes: int


def leaving_weights(
    config: Config, plan: PlanFile | None, vocab_size: int | None, dtype: torch.dtype, ranks: Ranks
) -> Leaving | None:
    """What options, or the plan, let leave; None: all weights are to lie on the device."""
    if plan is not None:
        count = layers_of(plan).weights
    else:
        leaves = config.model.cpu_offloading and config.model.cpu_offloading_weights
        count = config.model.cpu_offloading_num_layers if leaves else 0
    if not count:
        return None
    model = meta_model(config, vocab_size, dtype)
    paths, rounds = find_layers(model), config.model.virtual_pipeline_model_parallel_size or 1
    here = [path for i, (path, _) in enumerate(paths) if ranks.has_layer(i, len(paths), rounds)]
    names = set(here[:count])
    held = sum(math.prod(p.shape) for name, p in model.named_parameters() if layer_of(name) in names)
    parts = ranks.of_stage if ranks.divided else 1
    return Leaving(count, -(-held * dtype.itemsize // parts))


def build_on_cpu(
    config: Config, *, vocab_size: int | None, device: torch.device, dtype: torch.dtype, seed: int
) -> torch.nn.Module:
    """As `models.build_model`, on the CPU: for `hostward.move`. Weights are drawn on `device`, one at a time.

    Raises:
        ConfigError, ModelError: as there; a weight that is not drawn as the model is made.
    """
    model, draws = without_memory(config, vocab_size, device, dtype)
    if draws is not None:
        fill([model], draws, list(model.named_parameters()), device, seed, memory=torch.device("cpu"))
    trained: torch.nn.Module = model.train()
    return trained
