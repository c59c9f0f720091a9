"""Offloaded activations of compiled layers and models (T43, H47).

Seen red: hooks that a model which was compiled before does not call; hooks that are traced into the graph.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from activation_cases import FEW, Images, left_over, loss_of, offloading, same, transformer

# The compiler looks at .grad of everything, and warns of what it does itself.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: torch.nn.Module, how: str, name: str) -> torch.nn.Module:
    if how == "whole model":
        model.compile(backend=name)
    else:
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.compile(backend=name)
    return model


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    found = []
    for step in range(3):
        model.zero_grad()
        loss_of(model, step).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize(
    ("how", "called_before"), [("per layer", False), ("whole model", True)], ids=["per layer", "whole model, called"]
)
def test_t43_h47_compiled(how: str, called_before: bool) -> None:
    """Also of a model that has been compiled when it is attached to."""
    expected = gradients(compiled(transformer("Llama"), how, "aot_eager"))
    torch.compiler.reset()
    model = compiled(transformer("Llama"), how, "aot_eager")
    if called_before:
        loss_of(model, 0).backward()
    with offloading(model, FEW[1]) as run:
        assert same(gradients(model), expected)
        report = run.report()
        assert left_over(run) == 0
    assert report.offloaded_bytes == report.reloaded_bytes > 0
    assert report.freed_bytes > 0.9 * report.offloaded_bytes


@pytest.mark.parametrize(
    "name",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler"),
        ),
    ],
)
def test_t43_compiled_layers_of_a_network_of_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Any hook on a compiled module makes other graphs of it, with other kernels and bits: the reference has one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def run(*, attached: bool) -> list[torch.Tensor]:
        torch.compiler.reset()
        model = Images()
        for stage in model.stages:
            stage.compile(backend=name)
            if not attached:
                stage.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
        if not attached:
            return gradients(model)
        with offloading(model, FEW[1]) as run:
            found = gradients(model)
            assert left_over(run) == 0
            report = run.report()
        assert report.offloaded_bytes == report.reloaded_bytes > 0
        return found

    with torch._inductor.config.patch(compile_threads=1):
        assert same(run(attached=True), run(attached=False))
