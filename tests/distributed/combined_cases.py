"""What each rank does: a sharded network stepped by torch's optimizers with given gradients, their state offloaded."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from any_optimizer_cases import cut_small
from sharded_cases import Net, digest, gradient_of, loss_of, mesh_of, sharded
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import hostward
from hostward.distributed import fsdp2
from hostward.optim.any_optimizer import sharded_muon
from hostward.optim.any_optimizer.staging import AwayState
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

SMALL_CHUNK_BYTES = 12_000
"""A chunk has one part of a matrix of the network where two ranks share it."""


def is_matrix(name: str, p: torch.Tensor) -> bool:
    return name.startswith("blocks.") and p.ndim == 2


def optimizer_of(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if is_matrix(name, p)]
    rest = [p for name, p in named.items() if not is_matrix(name, p)]
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.01)
    if kind == "lion":
        return lion(list(model.parameters()))
    other = lion(rest) if kind == "muon and lion" else torch.optim.AdamW(rest, lr=1e-2)
    muon = torch.optim.Muon(matrices, lr=2e-2, nesterov=kind != "plain momentum")
    return hostward.CombinedOptimizer(muon, *([] if kind == "muon alone" else [other]))


def lion(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """That of another package, which only these cases need."""
    package = importlib.import_module("pytorch_optimizer")
    return package.Lion(parameters, lr=1e-3)  # type: ignore[no-any-return]


def set_gradients(model: torch.nn.Module, step: int) -> None:
    for name, p in model.named_parameters():
        whole = gradient_of(name, p.shape, step).to(p.dtype)
        if isinstance(p, DTensor):
            whole = fsdp2.like(fsdp2.layout_of(name, p).part(whole).clone(), p)
        p.grad = whole


def offloaded(optimizer: torch.optim.Optimizer, fraction: float) -> tuple[hostward.StreamedStates, AwayState]:
    late = Order(late=frozenset({Lane.H2D, Lane.D2H}))
    backend = SimulatedBackend(threads=1, order=late)
    states = hostward.offload_optimizer_states(optimizer, fraction=fraction, chunk_size_mb=1, backend=backend)
    return states, cut_small(states, SMALL_CHUNK_BYTES)


def whole_digest(tensor: torch.Tensor) -> str:
    return digest(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of whole weights and state tensors; state is read as training code reads it, on the device."""
    found = {}
    for name, p in model.named_parameters():
        found[f"weight {name}"] = whole_digest(p.detach())
        entry = optimizer.state[p]
        for key in sorted(entry):
            if isinstance(entry[key], torch.Tensor):
                found[f"{key} {name}"] = whole_digest(entry[key].view(-1) if entry[key].ndim == 0 else entry[key])
    return found


def trained(
    kind: str = "muon",
    fraction: float = 0.0,
    *,
    network: dict[str, Any] | None = None,
    steps: Sequence[int] = (0, 1, 2),
    batch_bytes: int | None = None,
    backward: bool = False,
    load: str = "",
    save: str = "",
) -> dict[str, Any]:
    """Digests of whole weights and state after steps with given gradients, and the bytes of state on the host.

    Args:
        network: None: it is not sharded.
        batch_bytes: whole matrices of a batch, by rank.
        backward: gradients are those of a loss, clipped.
        load, save: folders of distributed checkpoints, before and after.
    """
    model: Any = Net() if network is None else sharded(**network)
    optimizer = optimizer_of(kind, model)
    states, away = offloaded(optimizer, fraction)
    if load:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=load)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    kept_bytes = sharded_muon.BATCH_BYTES
    sharded_muon.BATCH_BYTES = kept_bytes if batch_bytes is None else batch_bytes
    try:
        for step in steps:
            if backward:
                optimizer.zero_grad()
                loss_of(model, step).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            else:
                set_gradients(model, step)
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step()
    finally:
        sharded_muon.BATCH_BYTES = kept_bytes
    held = states.offloaded_bytes, len(away.chunks), away.staging.peak_bytes
    if save:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=save)
    found = bits(model, optimizer)
    states.detach()
    assert bits(model, optimizer) == found
    return {"bits": found, "host_bytes": held[0], "chunks": held[1], "peak_bytes": held[2]}


def muon_of_torch_alone() -> dict[str, str]:
    """Digests of whole matrices after steps of torch's Muon as it is."""
    model: Any = sharded()
    named = {name: p for name, p in model.named_parameters() if is_matrix(name, p)}
    muon = torch.optim.Muon(named.values(), lr=2e-2)
    for step in range(3):
        set_gradients(model, step)
        muon.param_groups[0]["lr"] *= 0.5
        muon.step()
    return {f"weight {name}": whole_digest(p.detach()) for name, p in named.items()}


def kept_by_others() -> list[bool]:
    """Whether state is still on the device while somebody has the tensor, its part, or a view of the part."""
    model: Any = sharded()
    optimizer = optimizer_of("muon", model)
    offloaded(optimizer, 1.0)
    set_gradients(model, 0)
    optimizer.step()
    p, found = model.blocks[0].up.weight, []
    for take in (lambda t: t, DTensor.to_local, lambda t: t.to_local()[0], lambda t: None):
        with torch.no_grad():
            held = take(optimizer.state[p]["momentum_buffer"])
        set_gradients(model, 1)
        optimizer.step()
        found.append("momentum_buffer" not in optimizer.state[p].away)
        del held
    return found


class WritesItsPart(torch.optim.SGD):
    """It writes into this rank's part of its state, and fails."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        p = self.param_groups[0]["params"][0]
        if self.state[p]:
            with torch.no_grad():
                self.state[p]["momentum_buffer"].to_local().add_(1.0)
            raise RuntimeError("after a write")
        super().step()


def torn_after_a_write() -> list[str]:
    """The errors of a step that fails after it has written into a part, and of the next."""
    model: Any = sharded()
    optimizer = WritesItsPart([model.blocks[0].up.weight], lr=0.1, momentum=0.9)
    offloaded(optimizer, 1.0)
    found = []
    for step in range(3):
        set_gradients(model, step)
        try:
            optimizer.step()
        except (RuntimeError, hostward.HostwardError) as error:
            found.append(str(error).splitlines()[0])
    return found


def told(what: str) -> str:
    """The error's class and text."""
    try:
        globals()[f"_{what}"]()
    except hostward.HostwardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _tensor_parallel_as_well() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Net()
    for block in model.blocks:
        parallelize_module(block, grid["tensor"], {"up": ColwiseParallel()})
        fully_shard(block, mesh=grid["data"])
    hostward.CombinedOptimizer(torch.optim.Muon([model.blocks[0].up.weight]))  # type: ignore[union-attr, list-item]


def _gradient_of_another_placement() -> None:
    model: Any = sharded()
    p = model.blocks[0].up.weight
    optimizer = hostward.CombinedOptimizer(torch.optim.Muon([("up", p)]))
    p.grad = distribute_tensor(torch.ones(p.shape), mesh_of("all"), [Shard(1)])
    optimizer.step()


def _momentum_of_one_process() -> None:
    model: Any = sharded()
    p = model.blocks[0].up.weight
    optimizer = hostward.CombinedOptimizer(torch.optim.Muon([("up", p)]))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"momentum_buffer": torch.ones(p.shape)}}})
    set_gradients(model, 0)
    optimizer.step()


def _momentum_in_bf16() -> None:
    model: Any = sharded(dtype="bf16")
    optimizer = optimizer_of("plain momentum", model)
    set_gradients(model, 0)
    optimizer.step()
