"""Use weights right after the step as custom training loops do: read, copy and write them through torch alone.

`hostward verify` runs this without notifying the optimizer.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from hostward.optim.master_sync import bit_sum
from hostward.trainer.verify.claims import Claim

DECAY = 0.9
"""Decay used by the hand-made average."""
CLAMPED_AT = 2.0
"""Clamping limit, in standard deviations of a matrix at the start: about one element in twenty is beyond."""
_NAMED = 3
"""Names reported at most, if tensors differ."""

Bits = dict[str, int]
"""Sum over the bits of a tensor, by its name."""


class AfterStep:
    """Averages, measures, clamps and copies a model's weights after each step.

    Of weights that are sharded over ranks it uses this rank's part.

    The averages of `swa_utils` and the deep copies are where the weights are, the hand-made average and the second
    model on the host. All of them begin with the weights as they are now. Matrices are clamped through the tensor and
    through `.data` alternately.

    Args:
        model: the model as it is trained, whose weights are not offloaded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        weights = {name: _here(p).detach() for name, p in self._parameters.items()}
        matrices = [name for name, weight in weights.items() if weight.dim() > 1 and weight.numel() > 1]
        self._limits = {name: CLAMPED_AT * weights[name].float().std().item() for name in matrices}
        self._average = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}
        self._second = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}
        self._actions: dict[str, Callable[[], Bits]] = {
            "hand-made averages equal": self._average_by_hand,
            "norms of weights equal": self._norm,
            "weights clamped through the tensor equal": lambda: self._clamp(matrices[::2], through_data=False),
            "weights clamped through .data equal": lambda: self._clamp(matrices[1::2], through_data=True),
            "weights copied to a second model equal": self._copy_to_second,
        }
        if not _is_fsdp2(model):  # which does not support deep copies
            self._averaged = AveragedModel(model)
            self._actions["swa_utils averages equal"] = self._average_by_swa_utils
            self._actions["deep copies of the model equal"] = lambda: _bits_of(copy.deepcopy(self._model))
        self.found: dict[str, list[Bits]] = {name: [] for name in self._actions}
        """Values after each step, by claim."""

    @property
    def steps(self) -> int:
        """Steps until every action has been first once: later actions may find that weights have been reloaded
        already.
        """
        return len(self._actions)

    @torch.no_grad()
    def act(self) -> None:
        """Run every action once after a step, starting with a different one each time."""
        actions = list(self._actions.items())
        first = len(self.found[actions[0][0]]) % len(actions)
        for name, action in [*actions[first:], *actions[:first]]:
            self.found[name].append(action())

    def _average_by_swa_utils(self) -> Bits:
        self._averaged.update_parameters(self._model)
        return _bits_of(self._averaged.module)

    def _average_by_hand(self) -> Bits:
        for name, average in self._average.items():
            average.mul_(DECAY).add_(_here(self._parameters[name]).to("cpu"), alpha=1 - DECAY)
        return _bits(self._average)

    def _norm(self) -> Bits:
        norm = torch.nn.utils.get_total_norm([_here(p) for p in self._parameters.values()])
        return {"norm": int(bit_sum(norm.float()))}

    def _clamp(self, names: Sequence[str], *, through_data: bool) -> Bits:
        for name in names:
            weight, limit = _here(self._parameters[name]), self._limits[name]
            (weight.data if through_data else weight).clamp_(-limit, limit)
        return _bits({name: _here(self._parameters[name]) for name in names})

    def _copy_to_second(self) -> Bits:
        for name, copied in self._second.items():
            copied.data.copy_(_here(self._parameters[name]).data)
        return _bits(self._second)


def claims_after_steps(base: AfterStep, other: AfterStep) -> list[Claim]:
    """Return one claim for each action that was run after the steps of both runs."""
    return [_equal(name, mine, other.found[name]) for name, mine in base.found.items()]


def _equal(name: str, mine: Sequence[Bits], theirs: Sequence[Bits]) -> Claim:
    for step, (a, b) in enumerate(zip(mine, theirs, strict=True), 1):
        different = [tensor for tensor in a if a[tensor] != b.get(tensor)]
        if different:
            named = ", ".join(different[:_NAMED])
            detail = f"first after step {step} of {len(mine)}: {len(different)} of {len(a)} differ: {named}"
            return Claim(name, False, detail)
    return Claim(name, True, f"after each of {len(mine)} steps, {len(mine[0])} values")


def _here(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the local weight, or this rank's part of a sharded one, looked up anew at each use as a user would."""
    part: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def _bits(tensors: dict[str, torch.Tensor]) -> Bits:
    return {name: int(bit_sum(tensor)) for name, tensor in tensors.items()}


def _bits_of(model: torch.nn.Module) -> Bits:
    return _bits({name: _here(p) for name, p in model.named_parameters()})


def _is_fsdp2(model: Any) -> bool:
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
