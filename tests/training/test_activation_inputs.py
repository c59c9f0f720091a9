"""What several layers are given and save, such as an encoder's output or a position bias: copied once, then kept.

Seen red: copies in every layer; a tensor that one call is given twice, or an inner layer by an outer one, that stays.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from activation_cases import FEW, left_over, loss_of, offloading, same

from hostward.engine.simulated import Order

AGAIN = "several layers were given it"
SIZES = {"d_model": 64, "vocab_size": 64, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}


def t5() -> torch.nn.Module:
    """A position bias and the encoder's output go through all layers of the decoder."""
    torch.manual_seed(0)
    more = {"d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 4, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES, **more)).train()


def bart() -> torch.nn.Module:
    torch.manual_seed(0)
    more = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 4), ("ffn_dim", 96))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**SIZES, **more, **heads)).train()


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "T5": (t5, "decoder.block"),
    "Bart": (bart, "model.decoder.layers"),
}


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    found = []
    for seed in range(2):
        torch.manual_seed(seed)  # dropout
        model.zero_grad()
        loss_of(model, seed).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_what_an_encoder_made_leaves_once(name: str) -> None:
    make, path = MODELS[name]
    expected = gradients(make())
    for order in (Order(), *FEW):
        model = make()
        layers = list(model.get_submodule(path).children())
        with offloading(model, order, layers=layers) as run:
            assert same(gradients(model), expected), order
            assert left_over(run) == 0
            report = run.report()
        assert report.on_demand_bytes == 0
        states = 2 * 24 * 64 * 4  # batch, sequence, hidden, bytes
        # Two steps; two of three layers; keys and values save it.
        assert report.kept_bytes[AGAIN] >= 2 * 2 * 2 * states
        # The caller holds it, and with T5's the layer that makes the bias.
        assert report.held_bytes <= 2 * (states + 2 * 4 * 24 * 24 * 4)


class Plain(torch.nn.Module):
    """Layers that get x several times over in one call, or change it in place and return it."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Linear(16, 16)
            self.in_place = False

        def forward(self, x: torch.Tensor, y: torch.Tensor, *, z: torch.Tensor) -> torch.Tensor:
            if self.in_place:
                return x.add_(torch.tanh(self.weight.bias))
            out: torch.Tensor = self.weight(x) * y + z
            return out

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, x, z=x)
        return x


def test_what_goes_from_layer_to_layer_leaves() -> None:
    for changing in ([], [0, 1]):
        model = Plain()
        for i in changing:
            model.layers[i].in_place = True
        inner = [module for layer in model.layers for module in (layer, layer.weight)]
        for layers in (None, inner):
            with offloading(model, layers=layers) as run:
                x = torch.ones(4, 16, requires_grad=True) * 1.0
                model(x).sum().backward()
                assert run.report().offloaded_bytes > 0
                assert AGAIN not in run.report().kept_bytes
