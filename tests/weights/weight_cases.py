"""Networks trained with and without offloading of their weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from activation_cases import NETWORKS, loss_of

import hostward
from hostward.model.fence import without_functions
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend

ON_HOST = {"offload_fraction": 1.0, "streamed_fraction": 0.0}
ALL = hostward.Weights(min_elements=0)
SAVED = hostward.Activations(min_bytes=64)


def network(name: str, reentrant: bool | None = None) -> torch.nn.Module:
    model = NETWORKS[name]()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    return model


def train(
    model: torch.nn.Module,
    order: Order | None = None,
    *,
    steps: int = 2,
    microbatches: int = 2,
    attached: dict[str, Any] | None = None,
    each: Callable[[hostward.Attachment], None] | None = None,
    **options: Any,
) -> tuple[list[torch.Tensor], hostward.Attachment | None]:
    """Losses, norms and, in the end, weights and state; all state on the host."""
    backend = SimulatedBackend(threads=1, order=order or Order(eager=True))
    optimizer = hostward.AdamW(
        model, lr=1e-2, max_grad_norm=1.0, backend=backend, host_threads=1, **{**ON_HOST, **options}
    )
    run = None if attached is None else hostward.attach(model, optimizer, **attached)
    torch.manual_seed(1)  # dropout
    found = []
    for step in range(steps):
        for i in range(microbatches):
            with optimizer.accumulate(last=i == microbatches - 1):
                loss = loss_of(model, step * microbatches + i)
                loss.backward()
            found.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.tensor(optimizer.grad_norm))
        if run is not None and each is not None:
            each(run)
    if run is not None:
        run.detach()
    optimizer.wait()
    found += [p.detach().clone() for p in model.parameters()]
    state = optimizer.state_dict()["state"]
    found += [value for name in sorted(state) for value in state[name].values()]
    return found, run


@functools.cache
def expected(name: str, reentrant: bool | None = None, overlap: bool = True, gradients: str = "device") -> Any:
    """The same without offloading of weights."""
    return train(network(name, reentrant), overlap=overlap, gradients=gradients)[0]


def frozen(name: str = "Llama") -> torch.nn.Module:
    """A network whose layers are frozen; what is around them is trained by whoever likes."""
    model = network(name)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_("layers" not in path)
    return model


def gradients(model: torch.nn.Module, steps: int = 2) -> list[torch.Tensor]:
    """Losses and gradients of what is trained."""
    found = []
    for step in range(steps):
        model.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@contextmanager
def away(
    model: torch.nn.Module, order: Order | None = None, weights: Any = ALL, **options: Any
) -> Iterator[hostward.Attachment]:
    """Attached for the block; afterwards every weight is what and where it was."""
    before = {n: (p, p.untyped_storage()._cdata, p.detach().clone()) for n, p in model.named_parameters()}
    backend = SimulatedBackend(threads=1, order=order or Order(eager=True))
    run = hostward.attach(model, weights=weights, backend=backend, **options)
    try:
        yield run
    finally:
        run.detach()
    for name, parameter in model.named_parameters():
        kept, storage, value = before[name]
        assert parameter is kept, name
        assert parameter.untyped_storage()._cdata == storage, name
        assert torch.equal(parameter, value), name
    assert backend.ledger.total_bytes(Tier.HOST) == 0


def bytes_here(model: torch.nn.Module) -> int:
    """Of all weights' storages."""
    return sum({p: nbytes_here(p) for p in model.parameters()}.values())


def nbytes_here(parameter: torch.Tensor) -> int:
    """Of one weight's storage, without the fence, which would bring it."""
    with without_functions():
        return parameter.untyped_storage().nbytes()


def layers_here(model: torch.nn.Module) -> list[int]:
    """Numbers of the layers that have a weight with bytes."""
    layers: Any = model.model.layers  # type: ignore[union-attr]
    return [i for i, layer in enumerate(layers) if any(map(nbytes_here, layer.parameters()))]
