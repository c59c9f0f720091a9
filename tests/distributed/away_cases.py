"""What each rank does with sharded weights whose parts are away: what else reads and writes them."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sharded_cases import Net, adamw, digest, loss_of, mesh_of, sharded, snapshot, whole_of
from torch.distributed.fsdp import fully_shard

import hostward
from hostward.checkpoint import api
from hostward.errors import AsleepError
from hostward.runtime.backend import Event, Held
from hostward.runtime.simulated.backend import SimulatedBackend

AWAY = hostward.Weights(num_layers=2, min_elements=0)


def trained(model: Any, optimizer: hostward.AdamW, *steps: int) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def attached(order: str = "late") -> tuple[Any, hostward.AdamW, hostward.Attachment]:
    model = sharded()
    optimizer = adamw(model, "host", order)
    return model, optimizer, hostward.attach(model, optimizer, weights=AWAY)


def read_and_written() -> dict[str, tuple[str, str]]:
    """By what reads or writes weights that are away: what it gives, and what it gives where all are on the device."""
    plain: Any = sharded()
    reference = adamw(plain, "host", "late")
    model, optimizer, run = attached()
    found: dict[str, tuple[str, str]] = {}
    trained(plain, reference, 0, 1)
    trained(model, optimizer, 0, 1)
    reference.wait()
    expected = {name: digest(p) for name, p in plain.named_parameters()}

    state = {name: value.clone() for name, value in model.state_dict().items()}
    found |= {f"state_dict {name}": (digest(state[name]), bits) for name, bits in expected.items()}
    whole = {name: digest(whole_of(p)) for name, p in plain.named_parameters()}
    found |= {f"whole {name}": (digest(whole_of(value)), whole[name]) for name, value in state.items()}
    up = model.blocks[0].up.weight
    found["deepcopy"] = digest(copy.deepcopy(up)), expected["blocks.0.up.weight"]
    stream = io.BytesIO()
    torch.save(up, stream)
    stream.seek(0)
    found["pickled"] = digest(torch.load(stream, weights_only=False)), expected["blocks.0.up.weight"]
    model.apply(lambda _: None)
    model.to(torch.float32)  # reads and changes nothing
    trained(plain, reference, 2)
    trained(model, optimizer, 2)
    model.load_state_dict(state)
    plain.load_state_dict({name: value.clone() for name, value in state.items()})
    trained(plain, reference, 3)
    trained(model, optimizer, 3)
    run.detach()
    trained(plain, reference, 4)
    trained(model, optimizer, 4)
    after, later = snapshot(plain, reference), snapshot(model, optimizer)
    return found | {f"detached {name}": (bits, after[name]) for name, bits in later.items()}


def saved(folder: str) -> tuple[dict[str, str], dict[str, str]]:
    """Bits of training with parts away, and of what was saved then and loaded where all are on the device."""
    model, optimizer, run = attached()
    trained(model, optimizer, 0, 1)
    parts = api.parts_of(model, optimizer)
    group = mesh_of("all").get_group()
    api.save(Path(folder), 2, tensors=parts.tensors, plain={"optimizer": parts.optimizer}, group=group)
    run.detach()
    again: Any = sharded()
    other = adamw(again, "mixed")
    api.restore(Path(folder) / "iter_0000002", again, other, group=group)
    return snapshot(model, optimizer), snapshot(again, other)


def frozen(*, away: bool) -> dict[str, Any]:
    """Training of the head alone, beside blocks that are frozen; the optimizer is torch's."""
    model: Any = Net()
    for block in model.blocks:
        block.requires_grad_(False)
        fully_shard(block, mesh=mesh_of("all"))
    fully_shard(model, mesh=mesh_of("all"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    backend = hostward.runtime.simulated.backend.SimulatedBackend(threads=1)
    run = hostward.attach(model, weights=AWAY, backend=backend) if away else None
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        found = None if run is None else run.report().weights
        with torch.no_grad():
            loss_of(model, step)
    if run is not None:
        run.detach()
    model.reshard()
    weights = {name: digest(p) for name, p in model.named_parameters()}
    return {"weights": weights, "freed": found and found.freed_bytes, "fetched": found and found.fetched_bytes}


def asleep() -> tuple[dict[str, str], dict[str, str]]:
    """Bits of frozen blocks, which the optimizer does not have, before and after a sleep in which one was called."""
    model: Any = Net()
    for block in model.blocks:
        block.requires_grad_(False)
        fully_shard(block, mesh=mesh_of("all"))
    fully_shard(model, mesh=mesh_of("all"))
    optimizer = adamw(model, "mixed", "late")
    trained(model, optimizer, 0)
    before = {name: digest(p) for name, p in model.named_parameters()}
    assert not optimizer.sleep().stays
    try:
        model.blocks[0](torch.zeros(4, model.blocks[0].up.in_features))
    except AsleepError:
        optimizer.wake()
    return before, {name: digest(p) for name, p in model.named_parameters()}


def asleep_before_the_first_forward() -> tuple[dict[str, str], dict[str, str]]:
    """Bits after a step, without and with a sleep before it in which FSDP2 was asked for whole weights."""
    found = []
    for sleeps in (False, True):
        model: Any = sharded()
        optimizer = adamw(model, "mixed", "late", fence=False)
        if sleeps:
            assert not optimizer.sleep().stays
            for use in (lambda model=model: loss_of(model, 0), *(module.unshard for module in (model, *model.blocks))):
                try:
                    use()
                except AsleepError:
                    continue
                raise AssertionError("weights that are asleep were gathered")
            optimizer.wake()
        trained(model, optimizer, 0)
        optimizer.wait()
        found.append({name: digest(p) for name, p in model.named_parameters()})
    return found[0], found[1]


def fail_between_blocks(model: Any) -> None:
    """A forward that ends there on every rank; then no weight is whole any more."""
    handle = model.blocks[1].up.register_forward_pre_hook(_fail)
    try:
        loss_of(model, 9)
    except StopError:
        handle.remove()
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.reshard()


def interrupted() -> tuple[dict[str, str], dict[str, str]]:
    """Bits after a forward that failed between two blocks on every rank, and training that went on; and without."""

    found = []
    for away in (True, False):
        model: Any = sharded()
        optimizer = adamw(model, "host", "late")
        run = hostward.attach(model, optimizer, weights=AWAY) if away else None
        trained(model, optimizer, 0)
        fail_between_blocks(model)
        trained(model, optimizer, 1, 2)
        if run is not None:
            run.detach()
        found.append(snapshot(model, optimizer))
    return found[0], found[1]


def groups_of_their_own() -> dict[str, int]:
    """Bytes that are fetched in three steps: of blocks whose inner modules are gathered for themselves, each once in
    forward and once in backward.
    """
    model = sharded(alone=["blocks.0.up", "blocks.1.up"])
    optimizer = adamw(model, "host", "late")
    run = hostward.attach(model, optimizer, weights=AWAY)
    trained(model, optimizer, 0, 1, 2)
    away = run.report().weights
    assert away is not None
    return {"offloaded": away.offloaded_bytes, "fetched": away.fetched_bytes}


def some_frozen(*, away: bool) -> dict[str, str]:
    """Bits where each group has frozen weights beside trained ones, and the frozen ones were loaded in between."""
    model: Any = Net()
    for block in model.blocks:
        block.up.requires_grad_(False)
        fully_shard(block, mesh=mesh_of("all"))
    fully_shard(model, mesh=mesh_of("all"))
    optimizer = adamw(model, "host", "late")
    run = hostward.attach(model, optimizer, weights=AWAY) if away else None
    trained(model, optimizer, 0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: 2 * value if "up" in name else value for name, value in state.items()})
    trained(model, optimizer, 1, 2)
    if run is not None:
        run.detach()
    return snapshot(model, optimizer)


def evaluated() -> tuple[int, int, int]:
    """Bytes that five forwards without backward had to wait for, those fetched, and those of a unit."""
    model: Any = sharded()
    model.requires_grad_(False)
    run = hostward.attach(model, weights=AWAY, backend=SimulatedBackend(threads=1))
    for seed in range(5):
        with torch.no_grad():
            loss_of(model, seed)
    report = run.report().weights
    assert report is not None
    run.detach()
    return report.on_demand_bytes, report.fetched_bytes, report.offloaded_bytes


class GatherStream(torch.cpu.Stream):  # type: ignore[misc]
    """Gathers run on it, one after another; their events are numbers."""

    recorded = 0

    def record_event(self) -> int:
        self.recorded += 1
        return self.recorded


class Watched(SimulatedBackend):
    """Numbers what is held while there is a meter, and remembers what is waited for behind it."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.gathers = GatherStream()
        self.helds = 0
        self.awaited: list[int] = []
        self.waited: list[bool] = []
        """Whether that was for the gather that was held."""

    def wait_on_stream_timed(self, stream: torch.Stream, waits: Sequence[Event]) -> Held | None:
        super().wait_on_stream_timed(stream, waits)
        self.helds += 1
        return None if self.meter is None else (self.helds, self.gathers.recorded + 1)

    def wait_behind(self, name: str, held: Held, event: Any) -> None:
        self.awaited.append(held[0])
        self.waited.append(event == held[1])


def watched(**options: Any) -> dict[str, Any]:
    """What is waited for behind gathers that were held: without a trace, and in two steps with one. Between these a
    forward fails, and a block is made whole by hand, for which no stream is held.
    """
    model: Any = sharded(**options)
    backend = Watched()
    optimizer = hostward.AdamW(model, lr=1e-2, offload_fraction=1.0, streamed_fraction=0.0, backend=backend)
    run = hostward.attach(model, optimizer, weights=AWAY)
    trained(model, optimizer, 0)
    model._get_fsdp_state()._comm_ctx.all_gather_stream = backend.gathers  # made in the first forward
    trained(model, optimizer, 1)
    untraced = list(backend.awaited)
    with optimizer.trace() as trace:
        trained(model, optimizer, 2)
        fail_between_blocks(model)
        model.blocks[0].unshard()
        trained(model, optimizer, 3)
    traced, parts = list(backend.awaited), trace.summary().parts
    trained(model, optimizer, 4)
    run.detach()
    return {
        "untraced": untraced,
        "traced": traced,
        "for its gather": all(backend.waited),
        "after": backend.awaited[len(traced) :],
        "exposed": [part.exposed_s for part in parts.values()],
    }


class StopError(Exception):
    """A failure of the model."""


def _fail(*_: object) -> None:
    raise StopError
