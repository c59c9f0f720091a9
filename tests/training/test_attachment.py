"""What `attach` refuses, and what an attachment tells about itself.

Seen red: an optimizer whose parameters nobody compares; hooks that nobody looks for; a report without its sentence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from activation_cases import NETWORKS, loss_of, offloading

import hostward
from hostward.errors import ConfigError


class Net(torch.nn.Module):
    """Four layers of two matrices."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(8, 24)
            self.down = torch.nn.Linear(24, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
            return out

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_an_attachment_says_what_it_does() -> None:
    model = NETWORKS["Llama"]()
    with offloading(model, num_layers=2, modules=("mlp", "core_attn")) as run:
        assert repr(run) == (
            "Attachment(model.layers.0 to model.layers.1, 2 layers of 4: what they save for backward leaves in mlp, "
            "core_attn; so far 0 bytes to the host, 0 back)"
        )
        loss_of(model, 0).backward()
        copied = run.report().offloaded_bytes
        assert f"so far {copied:,} bytes to the host, {copied:,} back)" in repr(run)
    assert repr(run).endswith("back; detached)")
    with offloading(model, num_layers=1) as run:
        assert repr(run).startswith("Attachment(model.layers.0 of 4: what")


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = Net(), Net()
    optimizer = hostward.AdamW(other)
    with pytest.raises(ConfigError, match=r"none of its 16 parameters belongs[\s\S]*fix: pass the optimizer"):
        hostward.attach(model, optimizer, activations=1)
    hostward.attach(other, optimizer, activations=1).detach()
    some = hostward.AdamW([("last.weight", model.layers[3].up.weight)])
    hostward.attach(model, some, activations=1).detach()


@pytest.mark.parametrize("second", [lambda m: m, lambda m: torch.nn.Sequential(m, m.layers[0]), lambda m: m.layers])
def test_attached_twice_is_refused(second: Callable[[Net], torch.nn.Module]) -> None:
    """The model itself, a module around it, and a part of it; a copy is another model."""
    model = Net()
    run = hostward.attach(model, activations=1)
    with pytest.raises(ConfigError, match=r"attached already: [\s\S]*leave twice[\s\S]*detach\(\)"):
        hostward.attach(second(model), activations=1, layers=list(model.layers))
    hostward.attach(copy.deepcopy(model), activations=1).detach()
    run.detach()
    hostward.attach(second(model), activations=1, layers=list(model.layers)).detach()
