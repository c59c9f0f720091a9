"""What cannot be met over FSDP2, tried on every rank; each returns the error as it is told."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from sharded_cases import Net, adamw, loss_of, mesh_of, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import hostward
from hostward.checkpoint import api
from hostward.errors import MemoryLimitError
from hostward.profiler.workload import workload_of
from hostward.runtime.backend import Buffer, Tier
from hostward.runtime.simulated.backend import SimulatedBackend


def told(what: str) -> str:
    """The error's class and text."""
    try:
        globals()[f"_{what}"]()
    except hostward.HostwardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _planned() -> None:
    workload_of(sharded(), sequence_tokens=3, loss=lambda model, _: loss_of(model, 0))


def _both_offload() -> None:
    adamw(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), "host")


def _sharded_afterwards() -> None:
    model: Any = Net()
    optimizer = adamw(model)
    fully_shard(model, mesh=mesh_of("all"))
    loss_of(model, 0).backward()
    optimizer.step()


def _sharded_moments_rounded_to_fp8() -> None:
    model: Any = sharded()
    optimizer = adamw(model)
    loss_of(model, 0).backward()
    optimizer.step()
    hostward.convert.rounded(optimizer.state_dict(), {"exp_avg": torch.bfloat16})
    hostward.convert.rounded(optimizer.state_dict(), {"exp_avg": torch.uint8})


def _asleep_after_an_error_in_backward() -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("in backward")

    model: Any = sharded()
    optimizer = adamw(model)
    handle = model.blocks[0].register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)
    with contextlib.suppress(RuntimeError):
        loss_of(model, 0).backward()
    handle.remove()
    optimizer.sleep()


def _half_sharded() -> None:
    model = Net()
    fully_shard(model.blocks[0], mesh=mesh_of("all"))
    adamw(model)


def _without_the_module() -> None:
    adamw(list(sharded().named_parameters()))  # type: ignore[arg-type]


def _two_meshes() -> None:
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of("pairs"))
    fully_shard(model, mesh=mesh_of("all"))
    adamw(model)


def _tensor_parallel_of_a_part() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Net()
    for block in model.blocks:
        parallelize_module(block, grid["tensor"], {"up": ColwiseParallel()})
        fully_shard(block, mesh=grid["data"])
    fully_shard(model, mesh=grid["data"])
    adamw(model)


def _tensor_parallel_alone() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Net()
    parallelize_module(model.blocks[0], grid["tensor"], {"up": ColwiseParallel()})
    adamw(model)


def _clipped_after_they_left() -> None:
    model: Any = sharded()
    optimizer = adamw(model, "host")
    with optimizer.accumulate(last=True):
        loss_of(model, 0).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _state_of_another_mesh() -> None:
    optimizer = adamw(sharded(mesh="hybrid"))
    adamw(sharded(mesh="all")).load_state_dict(optimizer.state_dict())


def _weights_away_beside_their_policy() -> None:
    model: Any = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    model.requires_grad_(False)
    hostward.attach(model, weights=2, backend=SimulatedBackend(threads=1))


def _moved() -> None:
    hostward.move(sharded(), "cpu", weights=2)


def _replaced_by_loading() -> None:
    model: Any = sharded()
    model.requires_grad_(False)
    hostward.attach(model, weights=hostward.Weights(2, min_elements=0), backend=SimulatedBackend(threads=1))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def _weights_away_of_matrices() -> None:
    model: Any = Net()
    for block in model.blocks:
        parallelize_module(block, mesh_of("all"), {"up": ColwiseParallel()})
    hostward.attach(model, weights=2, backend=SimulatedBackend(threads=1))


def _weights_away_and_stepped_here() -> None:
    model: Any = sharded()
    hostward.attach(model, adamw(model, "streamed"), weights=2)


def _a_checkpoint_of_one_process() -> None:
    api.save(Path("never made"), 1, tensors=sharded().state_dict(), plain={})


def _a_gradient_not_reduced() -> None:
    model: Any = sharded()
    optimizer = adamw(model)
    for p in model.parameters():
        p.grad = DTensor.from_local(torch.ones(p.shape), p.device_mesh, [Partial()], run_check=False)
    optimizer.step()


def _a_gradient_without_ranks() -> None:
    model: Any = sharded()
    optimizer = adamw(model)
    for p in model.parameters():
        p.grad = torch.ones(p.shape)
    optimizer.step()


class FullHost(SimulatedBackend):
    """Has no memory for copies of a second layer's weights."""

    def allocate(self, tier: Tier, *args: Any, **options: Any) -> list[Buffer]:
        if tier is Tier.HOST and self.ledger.total_bytes(tier):
            raise MemoryLimitError("the host is full", why="the machine is small", fix="free memory")
        return super().allocate(tier, *args, **options)


def _asked(model: Any, what: str, backend: SimulatedBackend, *, refuses: bool) -> dict[str, Any]:
    """Of `attach`, so that this rank refuses or does not."""
    if what == "stepped on the device":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("three"))  # of its three rows a fourth rank has none
        optimizer = hostward.AdamW(model, backend=backend)
        return {"optimizer": optimizer, "weights": hostward.Weights(2, min_elements=10**9)}
    model.requires_grad_(False)
    modules = ("down", "upp") if refuses and what == "modules" else ("down",)
    return {
        "activations": hostward.Activations(min_bytes=1, modules=modules),
        "weights": hostward.Weights(2, min_elements=0),
        "recompute": ("norm",),
        "backend": backend,
    }


def refused_by_some(what: str, mesh: str, ranks: list[int]) -> dict[str, Any]:
    """What a rank is told where these refuse; and the model and the host's bytes before it, and then."""
    model: Any = sharded(mesh)
    refuses = torch.distributed.get_rank() in ranks
    backend = FullHost(threads=1) if refuses and what == "host memory" else SimulatedBackend(threads=1)
    asked = _asked(model, what, backend, refuses=refuses)
    before, told = (_state_of(model), backend.ledger.total_bytes(Tier.HOST)), "no error"
    try:
        hostward.attach(model, **asked)
    except hostward.HostwardError as error:
        told = f"{type(error).__name__}: {error}"
    after = _state_of(model), backend.ledger.total_bytes(Tier.HOST)
    loss_of(model, 0)  # gathers: nobody was left in another collective
    with hostward.attach(model, **_asked(model, "", SimulatedBackend(threads=1), refuses=False)):
        loss_of(model, 0)
    return {"told": told, "before": before, "after": after}


def _state_of(model: Any) -> dict[str, Any]:
    """By module its hooks and what stands on the instance, by parameter the bytes that are there."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = {kind: len(held) for kind, held in vars(module).items() if kind.endswith("_hooks")}
        found[name] = hooks, sorted(vars(module))
    for name, parameter in model.named_parameters():
        found[f"bytes of {name}"] = parameter.to_local().untyped_storage().nbytes()
    return found
