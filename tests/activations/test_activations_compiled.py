"""Offloaded activations of compiled layers and models (T43, H47).

Seen red: hooks that a model which was compiled before does not call; hooks that are traced into the graph.
"""

from __future__ import annotations

import functools
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


@functools.cache
def alone(how: str, name: str) -> list[torch.Tensor]:
    """Gradients of a compiled model to which nothing is attached."""
    return gradients(compiled(transformer("Llama"), how, name))


@pytest.mark.parametrize("called_before", [True, False], ids=["called before", "not called before"])
@pytest.mark.parametrize("how", ["per layer", "whole model"])
def test_t43_h47_compiled(how: str, called_before: bool) -> None:
    name = "aot_eager"
    expected = alone(how, name)
    for order in FEW[1:2]:
        torch.compiler.reset()
        model = compiled(transformer("Llama"), how, name)
        if called_before:
            loss_of(model, 0).backward()
        with offloading(model, order) as run:
            assert same(gradients(model), expected)
            report = run.report()
            assert left_over(run) == 0
        assert report.offloaded_bytes == report.reloaded_bytes > 0
        assert report.freed_bytes > 0.9 * report.offloaded_bytes


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_t43_layers_compiled_by_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference has a hook of its own: kernels may depend on where the graph breaks."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)

    def run(*, attached: bool) -> tuple[list[torch.Tensor], int]:
        torch.compiler.reset()
        model = compiled(transformer("Llama"), "per layer", "inductor")
        if not attached:
            for layer in model.model.layers:  # type: ignore[union-attr]
                layer.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
            return gradients(model), 0
        with offloading(model, FEW[1]) as run:
            found = gradients(model)
            assert left_over(run) == 0
            report = run.report()
        assert report.offloaded_bytes == report.reloaded_bytes
        return found, report.offloaded_bytes

    found, offloaded = run(attached=True)
    assert offloaded > 0
    assert same(found, run(attached=False)[0])


def test_t43_a_compiled_network_of_another_kind() -> None:
    """Any hook on a compiled module makes other graphs of it, with other bits: the reference has one as well."""

    def run(*, attached: bool) -> list[torch.Tensor]:
        torch.compiler.reset()
        model = Images()
        for stage in model.stages:
            stage.compile(backend="aot_eager")
            if not attached:
                stage.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
        if not attached:
            return gradients(model)
        with offloading(model, FEW[1]):
            return gradients(model)

    assert same(run(attached=True), run(attached=False))
